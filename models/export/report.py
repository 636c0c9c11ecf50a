"""The table of an export: what each precision weighs, how near it is, how fast, what it failed."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from models.export.gates import BOUNDS, TENSORRT_ENGINE, Bounds, Gate, Precision
from models.export.measurement import Measured

_HEAD = (
    *("precision", "provider", "MB", "cosine min", "cosine mean", "batch", "norm"),
    *("overlap@10", "nDCG@10", "difference", "p50 ms", "batch-32 q/s", "gates"),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One precision.

    Attributes:
        precision: Its name.
        provider: What it was measured on.
        weights: Name of its file.
        weights_sha256: Checksum of the file, or "".
        megabytes: Size of its weights [10⁶ bytes].
        measured: Its figures, or None if it did not run.
        gates: What was held to bounds.
        reason: Why it did not run or, of one that did, why TensorRT built no engine; or "".
    """

    precision: Precision
    provider: str
    weights: str
    weights_sha256: str
    megabytes: float
    measured: Measured | None
    gates: Sequence[Gate]
    reason: str = ""

    @property
    def failures(self) -> list[str]:
        """The gates that it failed, in words."""
        if self.measured is None:
            return [f"does not run: {self.reason}"]
        return [str(gate) for gate in self.gates if not gate.passed]


def as_json(rows: Sequence[Row], facts: Mapping[str, Any]) -> str:
    """Returns rows and facts, such as versions and checksums, as JSON."""
    table = [asdict(row) | {"failures": row.failures} for row in rows]
    bounds = {name: asdict(each) for name, each in _bounds().items()}
    return json.dumps({**facts, "bounds": bounds, "precisions": table}, indent=1) + "\n"


def as_markdown(name: str, rows: Sequence[Row], lines: Sequence[str]) -> str:
    """Returns the table under the pair's name, with lines on how it was measured."""
    bounds = [
        (title, *(f"{value:g}" for value in asdict(each).values()))
        for title, each in _bounds().items()
    ]
    return "\n".join(
        [
            f"# Export of {name}",
            "",
            *_table(_HEAD, [_cells(row) for row in rows]),
            "",
            "cosine: to the float32 checkpoint. batch: largest difference of a component between a",
            "text alone and in a padded batch. norm: distance from 1 of what the graph returns.",
            "difference: of nDCG@10 to the checkpoint's.",
            "",
            *_table(
                ("bounds", "cosine ≥", "batch ≤", "norm ≤", "overlap@10 ≥", "nDCG@10 loss ≤"),
                bounds,
            ),
            "",
            *(f"- {line}" for line in lines),
            "",
        ]
    )


def _bounds() -> dict[str, Bounds]:
    return dict(BOUNDS) | {"tensorrt (engine)": TENSORRT_ENGINE}


def _cells(row: Row) -> list[str]:
    failed = f"**failed**: {'; '.join(row.failures)}; files removed" if row.failures else "passed"
    start, size = [row.precision, row.provider], f"{row.megabytes:.1f}" if row.megabytes else ""
    if (found := row.measured) is None:
        return [*start, size, *[""] * 9, failed]
    ranking = [""] * 3
    if (hits := found.retrieval) is not None:
        difference = hits.ndcg - hits.reference_ndcg
        ranking = [f"{hits.overlap:.3f}", f"{hits.ndcg:.4f}", f"{difference:+.4f}"]
    return [
        *start,
        size,
        f"{found.cosine:.6f}",
        f"{found.mean_cosine:.6f}",
        f"{found.batch:.1e}",
        f"{found.norm:.1e}",
        *ranking,
        f"{found.speed.p50_ms:.2f}",
        f"{found.speed.batch_rate:.0f}",
        failed,
    ]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    ruler = ["---"] * len(head)
    return [f"| {' | '.join(cells)} |" for cells in (head, ruler, *rows)]
