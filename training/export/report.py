"""What each precision must reach to be served, and the table of what it reached."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Precision = Literal["fp32", "fp16", "int8", "tensorrt"]

# What is measured, and how it is written; of single texts the worst of all texts counts.
_VALUES = {
    "cosine": (".6f", "lowest cosine of the graph's vector to the float32 checkpoint's"),
    "mean cosine": (".6f", "its mean"),
    "batch": (
        ".1e",
        "largest difference of a component between a text alone and in a padded batch",
    ),
    "norm": (".1e", "largest distance from 1 of the L2 norm of what the graph returns"),
    "overlap@10": (
        ".3f",
        "mean part of the checkpoint's ten nearest documents that the graph finds",
    ),
    "nDCG@10": (".4f", "mean over judged queries, by exact search"),
    "nDCG@10 loss": ("+.4f", "what it is below the checkpoint's"),
    "p50 ms": (".2f", "median time of one query by itself, tokenizing included"),
    "queries/s": (".0f", "queries a second in batches of 32"),
}
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


@dataclass(frozen=True, slots=True)
class Row:
    """One precision: what it was measured on, and the name of its weights' file.

    Attributes:
        megabytes: Size of its weights [10⁶ bytes].
        values: What was measured, by the names of `_VALUES`; empty if it did not run.
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
        values = [
            f"{row.values[value]:{form}}" if value in row.values else ""
            for value, (form, _) in _VALUES.items()
        ]
        found.append([row.precision, row.provider, size, *values, failed or "passed"])
    thresholds = [
        [precision, *(f"{least:g}" for least in of_precision.values())]
        for precision, of_precision in THRESHOLDS.items()
    ]
    return "\n".join(
        [
            f"# Export of {name}",
            "",
            *_table(["precision", "provider", "MB", *_VALUES, "result"], found),
            "",
            *(f"- {value}: {meaning}" for value, (_, meaning) in _VALUES.items()),
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
