"""Systems on splits of one corpus: accuracy, and speed and size of the query side."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from itertools import cycle, islice
from pathlib import Path
from statistics import fmean
from typing import Any

from core.errors import CareError
from core.files import write_text, writing_in
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
from evaluation.cmedteb.evaluate import PairModel, System, with_instruction
from evaluation.cmedteb.results import render
from evaluation.cmedteb.tasks import task
from evaluation.cmedteb.tradeoff import measure_rates, query_side
from evaluation.dense import dense_run
from evaluation.metrics import NDCG_10, score, score_queries
from evaluation.statistics import mean_interval, paired_difference
from models.encoders.factory import weights_bytes

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
