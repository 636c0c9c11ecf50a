"""The fine-tuning data of recipes: annotated triples mixed with training splits of the tasks."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from core.errors import CareError
from core.progress import progress_bar
from core.records import (
    Triple,
    field_error,
    read_jsonl,
    read_triples,
    string,
    write_json,
    write_jsonl,
)
from core.text import normalize_text
from core.types import Document
from curation.common import output_folder, sample_key
from curation.config import BeirSource, BeirSplit, MixConfig, Source, StsSource, TriplesSource
from evaluation.beir import (
    beir_paths,
    check_judged,
    document_texts,
    read_documents,
    read_judged_queries,
    write_beir,
)

OUTPUT = "fine-tuning.jsonl"


def mix(config: MixConfig) -> dict[str, Any]:
    """Writes fine-tuning.jsonl, `query`, `positives`, `negatives`, in random order, and dev/.

    Queries of `dev` and `held_out` are dropped. Triples with equal queries become one with the
    documents of all; a positive of one is a negative of none. The folder dev/ has the split dev in
    BEIR's layout.

    Returns:
        The report, as written to fine-tuning.report.json: for each source `read` (triples with a
        positive), `sampled`, `held_out`, `positives` and `negatives`; over all, `triples` and
        `merged`.
    """
    with output_folder(config.output) as folder:
        dev = _write_dev(config.dev, folder / "dev")
        hidden = set(dev.values())
        for source in config.held_out:
            hidden |= set(_judged(source)[0].values())
        counts: dict[str, Counter[str]] = {source.name: Counter() for source in config.sources}
        spool = folder / f".{OUTPUT}.spool"
        try:
            places = _spool(config, spool, hidden, counts)
            order = sorted(places, key=lambda query: sample_key(config.seed, "mix", query))
            write_jsonl(folder / OUTPUT, _merged(spool, places, order))
        finally:
            spool.unlink(missing_ok=True)
        report: dict[str, Any] = {
            "triples": len(places),
            "merged": sum(len(found) - 1 for found in places.values()),
            "dev": len(dev),
            "sources": {name: dict(count) for name, count in counts.items()},
        }
        write_json(folder / "fine-tuning.report.json", report)
    return report


def _spool(
    config: MixConfig, spool: Path, hidden: set[str], counts: Mapping[str, Counter[str]]
) -> dict[str, list[int]]:
    """Writes the chosen triples to a file and returns their positions in it, by query.

    Queries are held in memory, but no documents.
    """
    places: dict[str, list[int]] = {}
    with spool.open("wb") as file:
        for source in config.sources:
            count = counts[source.name]
            chosen = _chosen(source, config.seed)
            triples = progress_bar(source.name, _triples(source), unit="triples")
            for number, triple in enumerate(triples):
                count["read"] += 1
                if chosen is not None and number not in chosen:
                    continue
                count["sampled"] += 1
                if triple.query in hidden:
                    count["held_out"] += 1
                    continue
                count["positives"] += len(triple.positives)
                count["negatives"] += len(triple.negatives)
                places.setdefault(triple.query, []).append(file.tell())
                file.write(json.dumps(triple, ensure_ascii=False).encode() + b"\n")
    if not places:
        reason = "no triple remains: check the sources and the held-out queries"
        raise CareError.at(config.output, reason, "no_triples")
    return places


def _chosen(source: Source, seed: int) -> set[int] | None:
    """Returns the numbers of a random sample of `limit` triples; None for all."""
    if source.limit is None:
        return None
    keys = [sample_key(seed, source.name, triple.query) for triple in _triples(source)]
    return set(sorted(range(len(keys)), key=keys.__getitem__)[: source.limit])


def _merged(
    spool: Path, places: Mapping[str, Sequence[int]], order: Iterable[str]
) -> Iterator[dict[str, Any]]:
    with spool.open("rb") as file:
        for query in order:
            positives: dict[str, None] = {}
            negatives: dict[str, None] = {}
            for place in places[query]:
                file.seek(place)
                triple = Triple(*json.loads(file.readline()))
                positives |= dict.fromkeys(triple.positives)
                negatives |= dict.fromkeys(triple.negatives)
            others = [text for text in negatives if text not in positives]
            yield {"query": query, "positives": list(positives), "negatives": others}


def _triples(source: Source) -> Iterator[Triple]:
    """Yields the triples of a source that have a positive."""
    found: Iterator[Triple]
    match source:
        case TriplesSource(path=path):
            found = (triple for _, triple in read_triples(path))
        case StsSource(path=path):
            found = _read_sts(path)
        case BeirSource():
            found = _read_beir(source)
    return (triple for triple in found if triple.positives)


def _read_sts(path: Path) -> Iterator[Triple]:
    """Yields each first text with the second texts of label 1, and of other labels, as lists."""
    found: dict[str, tuple[list[str], list[str]]] = {}
    for number, record in read_jsonl(path):
        first, second = (
            normalize_text(string(path, number, record, name)) for name in ("text1", "text2")
        )
        label = record.get("label")
        if not isinstance(label, int | float):
            raise field_error(path, number, "label", "is missing or not a number")
        positives, negatives = found.setdefault(first, ([], []))
        (positives if label >= 1 else negatives).append(second)
    return (Triple(query, tuple(p), tuple(n)) for query, (p, n) in found.items())


def _judged(source: BeirSplit) -> tuple[dict[str, str], dict[str, dict[str, int]]]:
    """Returns the normalised queries of a split by id, and its judgements."""
    paths = beir_paths(source.path, source.split)
    queries, qrels = read_judged_queries(paths.queries, paths.qrels)
    return {id_: normalize_text(text) for id_, text in queries.items()}, qrels


def _documents(source: BeirSplit, qrels: Mapping[str, Mapping[str, int]]) -> list[Document]:
    paths = beir_paths(source.path, source.split)
    documents = read_documents(paths.corpus)
    check_judged(paths.qrels, qrels, qrels, {document.id for document in documents})
    return documents


def _read_beir(source: BeirSource) -> Iterator[Triple]:
    queries, qrels = _judged(source)
    texts = document_texts(_documents(source, qrels))
    for query, grades in qrels.items():
        positives = tuple(texts[id_] for id_, grade in grades.items() if grade > 0)
        negatives = tuple(texts[id_] for id_, grade in grades.items() if grade == 0)
        yield Triple(queries[query], positives, negatives)


def _write_dev(source: BeirSplit | None, folder: Path) -> dict[str, str]:
    """Writes a split as the split dev of a folder, and returns its queries."""
    if source is None:
        return {}
    queries, qrels = _judged(source)
    write_beir(folder, "dev", _documents(source, qrels), queries, qrels)
    return queries
