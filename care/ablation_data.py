"""Training data of the ablations, with and without diversification (Table 11 of the CARE paper)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from core.files import new_folder
from core.records import Triple, read_jsonl, write_jsonl
from core.types import Document
from curation.diversity import DiversityOptions, Kind, diversify_file
from evaluation.bm25 import bm25_run
from training.data import read_examples
from training.schema import DataEntry, Part

# Folds of the questions; the recipes of the ablations hold out another one for the tests.
_POOL = [
    DataEntry(beir="", part=Part(folds=8, only=0)),
    DataEntry(beir="", part=Part(folds=8, only=1)),
]
# First texts of the filter, which are kept without a check: a small share of the pool.
_OPTIONS = DiversityOptions(seeds=200)
_DEPTH, _NEGATIVES = 50, 8
NAMES = NONE, QUERIES, BOTH = "none", "queries", "queries-documents"


def write_training_data(data: Path, out: Path, threads: int = 1) -> None:
    """Writes triples from all texts, from diverse questions, and from diverse documents too.

    `out` gets the files NAME.jsonl of `NAMES`, with equal numbers of questions. The negatives of a
    question are the first hits of BM25 that are not marked relevant. A folder that exists is kept.
    """
    if out.is_dir():
        return
    entries = [entry.model_copy(update={"beir": str(data)}) for entry in _POOL]
    pool = read_examples(entries, frozenset(), {})[0]
    documents = list(dict.fromkeys(text for example in pool for text in example.positives))
    out.parent.mkdir(parents=True, exist_ok=True)
    with new_folder(out) as folder:
        asked = set(_diverse(folder, "queries", [e.query for e in pool], threads))
        answers = _diverse(folder, "documents", documents, threads)
        diverse = [example for example in pool if example.query in asked]
        sample = np.random.default_rng(0).choice(len(pool), len(diverse), replace=False)
        chosen = {
            NONE: ([pool[row] for row in sorted(sample)], documents),
            QUERIES: (diverse, documents),
            BOTH: (diverse, answers),
        }
        for name, (examples, searched) in chosen.items():
            write_jsonl(folder / f"{name}.jsonl", triples(examples, searched))


def triples(examples: Sequence[Triple], documents: Sequence[str]) -> list[dict[str, Any]]:
    """Returns examples with hard negatives: the first hits of BM25 that are not positives."""
    corpus = (Document(id=str(row), text=text) for row, text in enumerate(documents))
    queries = {str(row): example.query for row, example in enumerate(examples)}
    run = bm25_run(corpus, queries, _DEPTH)
    found = []
    for row, example in enumerate(examples):
        hits = (documents[int(id_)] for id_ in run.get(str(row), {}))
        negatives = [text for text in hits if text not in example.positives][:_NEGATIVES]
        found.append(
            {"query": example.query, "positives": [*example.positives], "negatives": negatives}
        )
    return found


def _diverse(folder: Path, kind: Kind, texts: Sequence[str], threads: int) -> list[str]:
    source, kept = folder / f"{kind}-pool.jsonl", folder / f"{kind}-kept.jsonl"
    write_jsonl(source, ({"text": text} for text in texts))
    diversify_file(source, kept, kind, _OPTIONS, threads=threads)
    return [str(record["text"]) for _, record in read_jsonl(kept)]
