"""Acceptance thresholds of each precision, and the report of an export."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Precision = Literal["fp32", "fp16", "int8", "tensorrt"]

# Format and description of each value; values of single texts are the worst of all texts.
_VALUES = {
    "cosine": (".6f", "lowest cosine between the vectors of graph and float32 checkpoint"),
    "mean cosine": (".6f", "mean of these cosines"),
    "batch": (
        ".1e",
        "largest difference of a vector component between a text alone and in a padded batch",
    ),
    "norm": (".1e", "largest deviation of the L2 norm of the graph's vectors from 1"),
    "overlap@10": (
        ".3f",
        "mean share of the checkpoint's ten nearest documents that the graph also finds",
    ),
    "nDCG@10": (".4f", "mean over judged queries, with exact search"),
    "nDCG@10 loss": ("+.4f", "nDCG@10 of the checkpoint minus that of the graph"),
    "p50 ms": (".2f", "median latency of a single query, including tokenization"),
    "queries/s": (".0f", "queries per second in batches of 32"),
}
_AT_LEAST = ("cosine", "overlap@10")
_EXACT = {"cosine": 0.99999, "batch": 1e-4, "norm": 1e-4, "overlap@10": 0.99, "nDCG@10 loss": 0.002}
# Vector components are about 1/sqrt(d), 0.03 to 0.05. In a padded batch they may change by the
# rounding of half precision. With int8 they hardly change, because activation scales are fixed.
_HALF = {"cosine": 0.999, "batch": 5e-3, "norm": 2e-3, "overlap@10": 0.97, "nDCG@10 loss": 0.005}
_INT8 = {"cosine": 0.99, "batch": 1e-3, "norm": 1e-4, "overlap@10": 0.85, "nDCG@10 loss": 0.02}

# Acceptance thresholds by precision; a TensorRT engine computes in half precision.
THRESHOLDS: Mapping[str, Mapping[str, float]] = {
    "fp32": _EXACT,
    "fp16": _HALF,
    "int8": _INT8,
    "tensorrt": _EXACT,
    "tensorrt (engine)": _HALF,
}


@dataclass(frozen=True, slots=True)
class Row:
    """Result of exporting one precision."""

    precision: Precision
    provider: str  # execution provider of the measurements
    weights: str  # name of the file of weights
    weights_sha256: str = ""
    megabytes: float = 0.0  # size of the weights [10⁶ bytes]
    # Measured values by the names of `_VALUES`; empty if the graph does not run.
    values: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""  # why the graph does not run, or why no TensorRT engine was built; or ""

    @property
    def failures(self) -> list[str]:
        """Descriptions of the values that miss their thresholds; NaN always does."""
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
    """Returns the report of a pair as Markdown, with lines on how values were measured."""
    found = []
    for row in rows:
        failed = f"**failed**: {'; '.join(row.failures)}; files deleted" if row.failures else ""
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
