"""What each precision must reach to be served, and the table of what it reached."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from training.export.measurement import VALUES

Precision = Literal["fp32", "fp16", "int8", "tensorrt"]

_AT_LEAST = ("cosine", "overlap@10")
_EXACT = {"cosine": 0.99999, "batch": 1e-4, "norm": 1e-4, "overlap@10": 0.99, "nDCG@10 loss": 0.002}
# Components are some 1/sqrt(d), 0.03 to 0.05. Padding may move them by half precision's noise;
# integers of fixed scales hardly move, those of a scale for the whole batch would.
_HALF = {"cosine": 0.999, "batch": 5e-3, "norm": 2e-3, "overlap@10": 0.97, "nDCG@10 loss": 0.005}
_INT8 = {"cosine": 0.99, "batch": 1e-3, "norm": 1e-4, "overlap@10": 0.85, "nDCG@10 loss": 0.02}

# Acceptance thresholds by precision; TensorRT's own engine computes in half precision.
THRESHOLDS: Mapping[str, Mapping[str, float]] = {
    "fp32": _EXACT,
    "fp16": _HALF,
    "int8": _INT8,
    "tensorrt": _EXACT,
    "tensorrt (engine)": _HALF,
}
_FORMATS = {
    **dict.fromkeys(("cosine", "mean cosine"), ".6f"),
    **dict.fromkeys(("batch", "norm"), ".1e"),
    "overlap@10": ".3f",
    "nDCG@10": ".4f",
    "nDCG@10 loss": "+.4f",
    "p50 ms": ".2f",
    "queries/s": ".0f",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One precision: what it was measured on, and the name of its weights' file.

    Attributes:
        megabytes: Size of its weights [10⁶ bytes].
        values: What was measured, by the names of `VALUES`; empty if it did not run.
        reason: Why it did not run or, of one that did, why TensorRT built no engine; or "".
    """

    precision: Precision
    provider: str
    weights: str
    weights_sha256: str = ""
    megabytes: float = 0.0
    values: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""

    @property
    def failures(self) -> list[str]:
        """What misses its threshold, in words; NaN always does."""
        if not self.values:
            return [f"does not run: {self.reason}"]
        on_engine = self.provider == "tensorrt"
        thresholds = THRESHOLDS["tensorrt (engine)" if on_engine else self.precision]
        return [
            f"{name} {value:.6g} (must be {_relation(name)} {thresholds[name]:g})"
            for name, value in self.values.items()
            if name in thresholds and not _passes(name, value, thresholds[name])
        ]


def _passes(name: str, value: float, threshold: float) -> bool:
    return value >= threshold if name in _AT_LEAST else value <= threshold


def _relation(name: str) -> str:
    return "≥" if name in _AT_LEAST else "≤"


def as_markdown(name: str, rows: Sequence[Row], lines: Sequence[str]) -> str:
    """Returns the table under the pair's name, with lines on how it was measured."""
    found = []
    for row in rows:
        failed = f"**failed**: {'; '.join(row.failures)}; files removed" if row.failures else ""
        size = f"{row.megabytes:.1f}" if row.megabytes else ""
        values = [f"{row.values[v]:{_FORMATS[v]}}" if v in row.values else "" for v in VALUES]
        found.append([row.precision, row.provider, size, *values, failed or "passed"])
    thresholds = [
        [precision, *(f"{least:g}" for least in of_precision.values())]
        for precision, of_precision in THRESHOLDS.items()
    ]
    return "\n".join(
        [
            f"# Export of {name}",
            "",
            *_table(["precision", "provider", "MB", *VALUES, "result"], found),
            "",
            *(f"- {value}: {meaning}" for value, meaning in VALUES.items()),
            "",
            *_table(["thresholds", *(f"{v} {_relation(v)}" for v in _EXACT)], thresholds),
            "",
            *(f"- {line}" for line in lines),
            "",
        ]
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    ruler = ["---"] * len(head)
    return [f"| {' | '.join(cells)} |" for cells in (head, ruler, *rows)]
