"""The accuracy–speed plot: nDCG@10 against queries/s of the query side, on one machine."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from core.encoders import Pair
from core.files import write_text
from core.machine import available_cpus
from core.progress import progress_bar
from core.provenance import environment
from core.records import write_json
from core.text import normalize_text
from core.types import Document
from evaluation.bm25 import Bm25Index
from evaluation.cmedteb.evaluate import PairModel, System, evaluate_task, with_instruction
from evaluation.cmedteb.results import percent, render
from evaluation.cmedteb.tasks import RankingData, Task, TaskData, task
from evaluation.plots import SystemPoint, draw_tradeoff
from models.encoders.factory import load_encoder, weights_bytes

_ROUNDS = 5
_WARM_UP = 20

# Encodes or searches a batch of queries.
QuerySide = Callable[[Sequence[str]], object]


def measure_tradeoff(
    systems: Sequence[System], tasks: Mapping[Task, Callable[[], TaskData]], out: Path
) -> str:
    """Scores systems on the retrieval task and measures the rates of their query sides."""
    known = task("retrieval")
    data = tasks[known]()
    assert isinstance(data, RankingData)
    scores, query_sides = {}, {}
    for system in progress_bar(known.column, systems, unit="systems"):
        score = evaluate_task(system, known, data, out)
        assert score is not None
        scores[system.name] = score.interval
        query_sides[system.name] = query_side(system, known, data.corpus)
    rates = measure_rates(query_sides, list(data.queries.values()))
    points = []
    for system in systems:
        pair = system.pair if isinstance(system, PairModel) else None
        points.append(
            SystemPoint(
                system.name,
                rates[system.name],
                scores[system.name],
                asymmetric=pair is not None and is_asymmetric(pair),
                document_bytes=weights_bytes(pair.document, pair.folder) if pair else None,
            )
        )
    machine = environment() | {"processors": available_cpus()}
    table = render("tradeoff.md.j2", points=points, percent=percent, rounds=_ROUNDS, **machine)
    draw_tradeoff(points, out)
    write_text(out / "tradeoff.md", table)
    write_json(out / "tradeoff.json", {"points": [asdict(point) for point in points], **machine})
    return table


def measure_rates(
    sides: Mapping[str, QuerySide], queries: Sequence[str], batch_size: int = 1
) -> dict[str, float]:
    """Returns queries/s of each system: the median of interleaved rounds.

    `sides` are by system, as `query_side` returns them. In a round each side encodes or searches
    all `queries`, `batch_size` at once.
    """
    rates: dict[str, list[float]] = {name: [] for name in sides}
    starts = range(0, len(queries), batch_size)
    batches = [queries[start : start + batch_size] for start in starts]
    for run in sides.values():
        for batch in batches[:_WARM_UP]:
            run(batch)
    for _ in progress_bar("queries/s", range(_ROUNDS), unit="rounds"):
        for name, run in sides.items():
            started = time.perf_counter()
            for batch in batches:
                run(batch)
            rates[name].append(len(queries) / (time.perf_counter() - started))
    return {name: statistics.median(values) for name, values in rates.items()}


def query_side(
    system: System, known: Task, corpus: Mapping[str, str], threads: int = 0
) -> QuerySide:
    """Returns a function that encodes queries, or searches them by BM25.

    The instruction of the task `known` is added to the prompts that take one. `corpus`, texts of
    the documents by id, is for BM25. ONNX Runtime has `threads` threads; 0 for all available
    processors.
    """
    if isinstance(system, PairModel):
        spec = with_instruction(system.pair.query, known.instruction)
        encoder = load_encoder(spec, system.pair.folder, threads)
        return lambda queries: encoder.encode([normalize_text(query) for query in queries])
    documents = (Document(id_, text) for id_, text in corpus.items())
    index = Bm25Index(documents, system.analyzer)
    return lambda queries: index.search(queries, 10)


def is_asymmetric(pair: Pair) -> bool:
    """Whether the two sides are different models."""
    return (pair.query.model, pair.query.revision) != (pair.document.model, pair.document.revision)
