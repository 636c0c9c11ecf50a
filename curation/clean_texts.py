"""The first step from raw texts to training data: cleaned questions, documents and pairs."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from core.progress import progress_bar
from core.records import write_json, write_jsonl
from curation.cleaning import clean_documents, clean_queries, cleaners
from curation.common import output_folder, shuffled
from curation.config import Cleaning
from evaluation.beir import iterate_documents, read_queries, write_documents, write_queries


def clean_texts(
    queries: Path,
    corpus: Path,
    output: Path,
    *,
    benchmark: int = 0,
    options: Cleaning | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Cleans questions and documents, pairs them, and keeps questions apart for a benchmark.

    Writes to the folder `output`:

    - `cleaned/queries.jsonl` and `cleaned/corpus.jsonl`, to diversify and to annotate;
    - `cleaned/benchmark.jsonl`, the questions that are kept apart: no other file has them;
    - `pairs.jsonl`, `title` and `text`: each document with its title or, without a title, with the
      question of the same id.

    Questions are held in memory, documents are streamed. An interrupted call starts again.

    Args:
        queries: JSONL with `_id` and `text`.
        corpus: JSONL with `_id`, `text` and, optionally, `title` and `metadata`.
        output: The data folder of recipes.
        benchmark: Number of questions that are kept apart, a random sample.
        options: Lengths, and whether texts are anonymised.
        seed: Seed of the sample.

    Returns:
        The report, as written to clean.report.json.
    """
    of_queries, of_documents = cleaners(options or Cleaning())
    texts = clean_queries(read_queries(queries), of_queries)
    apart = set(shuffled(texts, seed, "benchmark")[:benchmark])
    with output_folder(output):
        folder = output / "cleaned"
        folder.mkdir(exist_ok=True)
        kept = folder / "corpus.jsonl"
        documents = progress_bar("clean", iterate_documents(corpus), unit="documents")
        write_documents(kept, clean_documents(documents, of_documents))
        write_jsonl(output / "pairs.jsonl", _pairs(kept, texts, {texts[id_] for id_ in apart}))
        write_queries(folder / "benchmark.jsonl", {i: t for i, t in texts.items() if i in apart})
        write_queries(folder / "queries.jsonl", {i: t for i, t in texts.items() if i not in apart})
        counts = {"queries": dict(of_queries.counts), "documents": dict(of_documents.counts)}
        report = {
            "queries": len(texts) - len(apart),
            "benchmark": len(apart),
            "documents": of_documents.counts["kept"],
            "cleaning": counts,
        }
        write_json(output / "clean.report.json", report)
    return report


def _pairs(corpus: Path, queries: Mapping[str, str], hidden: set[str]) -> Iterator[dict[str, str]]:
    for document in iterate_documents(corpus):
        title = document.title or queries.get(document.id, "")
        if title and title not in hidden:
            yield {"title": title, "text": document.text}
