"""Accuracy and speed of the query side, on one machine: on splits of a corpus, and as a plot."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from itertools import cycle, islice
from pathlib import Path
from statistics import fmean
from typing import Any

from core.encoders import Pair
from core.errors import CareError
from core.files import write_text, writing_in
from core.machine import available_cpus
from core.progress import progress_bar
from core.provenance import commit, environment, hardware
from core.records import write_json
from core.text import normalize_text
from core.types import Document
from evaluation.beir import (
    Qrels,
    Run,
    beir_paths,
    check_judged,
    document_texts,
    read_documents,
    read_judged_queries,
)
from evaluation.bm25 import Bm25Index
from evaluation.cmedteb.evaluate import PairModel, System, evaluate_task, with_instruction
from evaluation.cmedteb.results import percent, render
from evaluation.cmedteb.tasks import RankingData, Task, TaskData, task
from evaluation.dense import dense_run
from evaluation.metrics import NDCG_10, score, score_queries
from evaluation.plots import SystemPoint, draw_tradeoff
from evaluation.statistics import mean_interval, paired_difference
from models.encoders.factory import load_encoder, weights_bytes

RETRIEVAL = "retrieval"
BATCH = 32
# Splits of the same questions: as patients speak, and as they were asked.
_SPOKEN, _ASKED = "-spoken", "-asked"
_DEPTH = 100
# Queries of a round in which speed is measured; a multiple of the batch.
_TIMED = 320

# Ranks the documents for queries, given by id.
Search = Callable[[Mapping[str, str], Qrels], Run]


def compare_on_splits(
    systems: Sequence[System],
    data: Path,
    splits: Sequence[str],
    out: Path,
    instructions: Mapping[str, str] | None = None,
) -> tuple[dict[str, Any], str]:
    """Scores systems on splits by nDCG@10, and measures the speed of their query sides.

    Args:
        systems: As `load_systems` returns them; differences are to the first one.
        data: BEIR folder with the splits.
        splits: Names of splits. With both NAME-spoken and NAME-asked, the relative loss of nDCG@10
            from NAME-asked to NAME-spoken is computed.
        out: Folder of results, for splits.md and splits.json.
        instructions: Instructions by the names of tasks, which replace those of tasks.toml.

    Returns:
        The content of splits.json, and the Markdown tables of splits.md. For each system and
        split: nDCG@10 with its 95 % bootstrap interval, the paired difference to the first system,
        and the means of `evaluation.metrics.MEASURES`. For each system: microseconds of a query
        that is encoded alone and queries/s in batches of 32, both with one thread, and bytes of
        the query encoder's weights and tokenizer. Of BM25, the speed is that of the whole search.
    """
    paths = beir_paths(data, splits[0])
    corpus = document_texts(read_documents(paths.corpus))
    known = task(RETRIEVAL)
    instruction = (instructions or {}).get(RETRIEVAL, known.instruction)
    known = replace(known, instruction=instruction)
    read = {split: _read(data, split, corpus) for split in splits}
    scores: dict[str, dict[str, list[float]]] = {}
    means: dict[str, dict[str, dict[str, float]]] = {}
    for system in progress_bar("nDCG@10", systems, unit="systems"):
        search = _search(system, instruction, corpus)
        runs = {split: search(*judged) for split, judged in read.items()}
        scores[system.name] = {
            split: list(score_queries(NDCG_10, qrels, runs[split]).values())
            for split, (_, qrels) in read.items()
        }
        means[system.name] = {
            split: score(qrels, runs[split]) for split, (_, qrels) in read.items()
        }
    every = [text for queries, _ in read.values() for text in queries.values()]
    timed = list(islice(cycle(every), _TIMED))
    sides = {system.name: query_side(system, known, corpus, threads=1) for system in systems}
    alone, batched = (measure_rates(sides, timed, size) for size in (1, BATCH))
    first = scores[systems[0].name]
    result = {
        "systems": [
            {
                "name": system.name,
                "splits": _facts(scores[system.name], first),
                "measures": means[system.name],
                "loss": _losses(scores[system.name]),
                "microseconds": 1e6 / alone[system.name],
                "queries_per_second": batched[system.name],
                "query_bytes": _query_bytes(system),
            }
            for system in systems
        ],
        "queries": {split: len(queries) for split, (queries, _) in read.items()},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        **environment(),
        **hardware(),
    }
    table = render("splits.md.j2", batch=BATCH, **result)
    with writing_in(out):
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "splits.json", result)
        write_text(out / "splits.md", table)
    return result, table


def _read(data: Path, split: str, corpus: Mapping[str, str]) -> tuple[dict[str, str], Qrels]:
    paths = beir_paths(data, split)
    texts, qrels = read_judged_queries(paths.queries, paths.qrels)
    check_judged(paths.qrels, qrels, texts, corpus)
    if not any(grade > 0 for grades in qrels.values() for grade in grades.values()):
        message = f"no query of '{split}' has a relevant document: check its judgements"
        raise CareError(message, code="no_relevant_document", task=split)
    return {id_: normalize_text(text) for id_, text in texts.items()}, qrels


def _search(system: System, instruction: str, corpus: Mapping[str, str]) -> Search:
    if not isinstance(system, PairModel):
        texts = (Document(id_, text) for id_, text in corpus.items())
        index = Bm25Index(texts, system.analyzer)

        def bm25(queries: Mapping[str, str], _: Qrels) -> Run:
            return dict(zip(queries, index.search(list(queries.values()), _DEPTH), strict=True))

        return bm25
    pair = system.pair
    spec = with_instruction(pair.query, instruction)
    documents = system.vectors(pair.document, list(corpus.values()))

    def dense(queries: Mapping[str, str], qrels: Qrels) -> Run:
        vectors = system.vectors(spec, list(queries.values()))
        return dense_run(queries, vectors, corpus, documents, _DEPTH, qrels)

    return dense


def _facts(
    scores: Mapping[str, Sequence[float]], first: Mapping[str, Sequence[float]]
) -> dict[str, dict[str, dict[str, float]]]:
    return {
        split: {
            "ndcg@10": asdict(mean_interval(values)),
            "difference": asdict(paired_difference(values, first[split])),
        }
        for split, values in scores.items()
    }


def _losses(scores: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Returns 1 - nDCG@10 of NAME-spoken ÷ nDCG@10 of NAME-asked, by NAME."""
    losses = {}
    for split, values in scores.items():
        name = split.removesuffix(_SPOKEN)
        asked = fmean(scores.get(name + _ASKED, [0.0]))
        if name != split and asked:
            losses[name] = 1 - fmean(values) / asked
    return losses


def _query_bytes(system: System) -> int | None:
    """Returns the size [bytes] of the query encoder's weights and tokenizer; None for BM25."""
    if not isinstance(system, PairModel):
        return None
    spec, folder = system.pair.query, system.pair.folder
    tokenizer = (folder / spec.tokenizer).stat().st_size if spec.tokenizer else 0
    return weights_bytes(spec, folder) + tokenizer


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
