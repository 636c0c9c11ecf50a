"""What an exported graph must hold before the service may run it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from models.export.measurement import Measured

Precision = Literal["fp32", "fp16", "int8", "tensorrt"]


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds of one precision; `Measured` says what each figure is.

    Attributes:
        cosine: The lowest that passes.
        batch: The highest that passes.
        norm: The highest that passes.
        overlap: The lowest that passes.
        ndcg_loss: The highest that passes.
    """

    cosine: float
    batch: float
    norm: float
    overlap: float
    ndcg_loss: float


_EXACT = Bounds(cosine=0.99999, batch=1e-4, norm=1e-4, overlap=0.99, ndcg_loss=0.002)
# Components are some 1/sqrt(d), 0.03 to 0.05. Padding may move them by half precision's noise;
# integers of fixed scales hardly move, those of a scale for the whole batch would.
_HALF = Bounds(cosine=0.999, batch=5e-3, norm=2e-3, overlap=0.97, ndcg_loss=0.005)
_INTEGER = Bounds(cosine=0.99, batch=1e-3, norm=1e-4, overlap=0.85, ndcg_loss=0.02)

BOUNDS: Mapping[Precision, Bounds] = {
    "fp32": _EXACT,
    "fp16": _HALF,
    "int8": _INTEGER,
    "tensorrt": _EXACT,
}
# TensorRT computes the float32 graph in half precision.
TENSORRT_ENGINE = _HALF


@dataclass(frozen=True, slots=True)
class Gate:
    """One figure beside its bound.

    Attributes:
        name: What was measured.
        figure: What was found.
        bound: What it is held to.
        passed: Whether it holds; NaN never does.
    """

    name: str
    figure: float
    bound: float
    passed: bool

    def __str__(self) -> str:
        relation = "≥" if self.name in ("cosine", "overlap@10") else "≤"
        return f"{self.name} {self.figure:.6g} (must be {relation} {self.bound:g})"


def check(measured: Measured, bounds: Bounds) -> list[Gate]:
    """Holds figures to bounds; what was not measured has no gate."""
    gates = [
        _at_least("cosine", measured.cosine, bounds.cosine),
        _at_most("batch difference", measured.batch, bounds.batch),
        _at_most("norm", measured.norm, bounds.norm),
    ]
    if (found := measured.retrieval) is not None:
        gates.append(_at_least("overlap@10", found.overlap, bounds.overlap))
        loss = found.reference_ndcg - found.ndcg
        gates.append(_at_most("nDCG@10 loss", loss, bounds.ndcg_loss))
    return gates


def _at_least(name: str, figure: float, bound: float) -> Gate:
    return Gate(name, figure, bound, figure >= bound)


def _at_most(name: str, figure: float, bound: float) -> Gate:
    return Gate(name, figure, bound, figure <= bound)
