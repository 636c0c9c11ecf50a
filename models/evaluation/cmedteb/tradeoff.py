"""The accuracy–speed picture: nDCG@10 against the rate of the query side, on one machine."""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from core.files import write_text
from core.text import normalize_text
from core.types import Document, Pair
from models.encoders.loading import load_encoder
from models.evaluation.bm25 import Bm25Index
from models.evaluation.cmedteb.systems import with_instruction
from models.evaluation.cmedteb.table import percent
from models.evaluation.cmedteb.tasks import Task
from models.evaluation.plots import SystemPoint, draw_tradeoff

ROUNDS = 5
_WARM_UP = 20

Answer = Callable[[str], object]

NOTE = """\
queries/s: one query at a time, one after another, median of {rounds} rounds in which the systems
take turns; a pair's rate is that of encoding a query, BM25's of its whole search.
Machine: {machine}, {processors} processors."""


def measure_rates(
    answers: Mapping[str, Answer], queries: Sequence[str], *, rounds: int = ROUNDS
) -> dict[str, float]:
    """Returns queries/s of each system, the median of rounds in which they take turns.

    Args:
        answers: What answers a query, by name of the system.
        queries: The queries of a round.
        rounds: How often each system answers all of them.
    """
    rates: dict[str, list[float]] = {name: [] for name in answers}
    for answer in answers.values():
        for query in queries[:_WARM_UP]:
            answer(query)
    for _ in range(rounds):
        for name, answer in answers.items():
            started = time.perf_counter()
            for query in queries:
                answer(query)
            rates[name].append(len(queries) / (time.perf_counter() - started))
    return {name: statistics.median(values) for name, values in rates.items()}


def query_side(pair: Pair, known: Task) -> Answer:
    """Returns what encodes one query of a task with a pair, on all processors."""
    encoder = load_encoder(with_instruction(pair.query, known.instruction), pair.folder)
    return lambda query: encoder.encode([normalize_text(query)])


def bm25_side(corpus: Mapping[str, str]) -> Answer:
    """Returns what searches a corpus by BM25."""
    index = Bm25Index(Document(id_, text) for id_, text in corpus.items())
    return lambda query: index.search([query], 10)


def is_asymmetric(pair: Pair) -> bool:
    """Whether the two sides are different models."""
    return (pair.query.model, pair.query.revision) != (pair.document.model, pair.document.revision)


def document_bytes(pair: Pair) -> int:
    """Returns the size [bytes] of the document encoder's weights."""
    if pair.document.format == "onnx":
        return (pair.folder / pair.document.weights).stat().st_size
    from models.encoders.checkpoints import checkpoint_folder

    folder = checkpoint_folder(pair.document, pair.folder)
    weights = list(folder.glob("*.safetensors")) or list(folder.glob("pytorch_model*.bin"))
    return sum(path.stat().st_size for path in weights)


def write_tradeoff(points: Sequence[SystemPoint], out: Path) -> str:
    """Writes table, figures and JSON of the picture; returns the table."""
    lines = [
        "| system | nDCG@10 × 100 | queries/s | document encoder [MB] |",
        "|---|---|---:|---:|",
    ]
    for point in sorted(points, key=lambda p: -p.accuracy.value):
        size = f"{point.document_bytes / 1e6:.1f}" if point.document_bytes else "–"
        lines.append(
            f"| {point.name} | {percent(point.accuracy)} "
            f"| {point.queries_per_second:,.0f} | {size} |"
        )
    machine = {"machine": platform.machine(), "processors": len(os.sched_getaffinity(0))}
    table = "\n".join(lines) + "\n\n" + NOTE.format(rounds=ROUNDS, **machine) + "\n"
    draw_tradeoff(points, out)
    write_text(out / "tradeoff.md", table)
    result = {"points": [asdict(point) for point in points], **machine}
    write_text(out / "tradeoff.json", json.dumps(result, ensure_ascii=False, indent=1) + "\n")
    return table
