"""The accuracy–speed picture: nDCG@10 against the rate of the query side, on one machine."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

from core.cpus import available_cpus
from core.encoders import Pair
from core.files import write_text
from core.provenance import environment
from core.records import write_json
from core.text import normalize_text
from core.types import Document
from evaluation.bm25 import Bm25Index
from evaluation.cmedteb.evaluate import Bm25Model, PairModel, evaluate_task, with_instruction
from evaluation.cmedteb.results import percent
from evaluation.cmedteb.tasks import RankingData, Task
from evaluation.plots import SystemPoint, draw_tradeoff
from models.encoders.factory import load_encoder

ROUNDS = 5
_WARM_UP = 20

Answer = Callable[[str], object]

NOTE = """\
queries/s: one query at a time, one after another, median of {rounds} rounds in which the systems
take turns; a pair's rate is that of encoding a query, BM25's of its whole search.
Machine: {machine}, {processors} processors."""


def measure_tradeoff(
    systems: Sequence[PairModel | Bm25Model], known: Task, data: RankingData, out: Path
) -> str:
    """Scores systems and measures their rates; writes table, figures and JSON.

    Args:
        systems: The systems.
        known: A retrieval task.
        data: Its data.
        out: Folder of results.

    Returns:
        The table.
    """
    scores, answers = {}, {}
    for system in tqdm(systems, desc=known.column, unit=" systems"):
        score = evaluate_task(system, known, data, out)
        assert score is not None
        scores[system.name] = score.interval
        answers[system.name] = _query_side(system, known, data)
    rates = measure_rates(answers, list(data.queries.values()))
    points = []
    for system in systems:
        pair = system.pair if isinstance(system, PairModel) else None
        points.append(
            SystemPoint(
                system.name,
                rates[system.name],
                scores[system.name],
                asymmetric=pair is not None and is_asymmetric(pair),
                document_bytes=document_bytes(pair) if pair else None,
            )
        )
    return write_tradeoff(points, out)


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
    for _ in tqdm(range(rounds), desc="queries/s", unit=" rounds"):
        for name, answer in answers.items():
            started = time.perf_counter()
            for query in queries:
                answer(query)
            rates[name].append(len(queries) / (time.perf_counter() - started))
    return {name: statistics.median(values) for name, values in rates.items()}


def _query_side(system: PairModel | Bm25Model, known: Task, data: RankingData) -> Answer:
    """Returns what encodes one query on all processors, or searches by BM25."""
    if isinstance(system, Bm25Model):
        index = Bm25Index(Document(id_, text) for id_, text in data.corpus.items())
        return lambda query: index.search([query], 10)
    spec = with_instruction(system.pair.query, known.instruction)
    encoder = load_encoder(spec, system.pair.folder)
    return lambda query: encoder.encode([normalize_text(query)])


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
    machine = environment() | {"processors": available_cpus()}
    table = "\n".join(lines) + "\n\n" + NOTE.format(rounds=ROUNDS, **machine) + "\n"
    draw_tradeoff(points, out)
    write_text(out / "tradeoff.md", table)
    write_json(out / "tradeoff.json", {"points": [asdict(point) for point in points], **machine})
    return table
