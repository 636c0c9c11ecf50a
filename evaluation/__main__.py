"""`python -m evaluation`: score an index over HTTP, beside BM25 on the same documents."""

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from core import cli, documents
from core.documents import DocumentReader
from core.files import sha256_file
from core.provenance import environment
from core.records import write_json
from core.service_process import running_service
from core.types import Document
from core.versions import current_version, index_folder, read_manifest
from evaluation.beir import Qrels, check_judged, read_qrels, read_queries
from evaluation.bm25 import K1, B, bm25_run
from evaluation.http import search_run
from evaluation.metrics import MEASURES, score
from models.pairs import DEFAULT_PAIR, load_pair

_TOP_K = 100


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status; see `core.cli.run`."""
    parser = argparse.ArgumentParser(
        prog="python -m evaluation",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--indexes", default="indexes", help="folder of the indexes")
    parser.add_argument("--index", required=True, help="name of the index")
    parser.add_argument("--pair", default=DEFAULT_PAIR, help="pair whose query encoder is used")
    parser.add_argument("--queries", type=Path, required=True, help="JSONL with _id and text")
    parser.add_argument("--qrels", type=Path, required=True, help="TSV: query-id corpus-id score")
    parser.add_argument("--output", type=Path, help="also write the scores as JSON")
    options = parser.parse_args(arguments)
    return cli.run(lambda: _evaluate(options))


def _evaluate(options: argparse.Namespace) -> None:
    qrels = read_qrels(options.qrels)
    every = read_queries(options.queries)
    check_judged(options.qrels, dict.fromkeys(qrels, ()), every, ())
    queries = {id_: every[id_] for id_ in qrels}
    root = Path(options.indexes)
    folder = index_folder(root, options.index) / current_version(root, options.index)
    manifest = read_manifest(folder)
    chunks = DocumentReader(folder / documents.FILE_NAME)
    coverage = judgement_coverage(qrels, chunks)
    if coverage["judged_documents_not_indexed"]:
        print(
            f"warning: {coverage['judged_documents_not_indexed']:,} of "
            f"{coverage['judged_documents']:,} judged documents are not in index "
            f"'{options.index}'; {coverage['queries_without_indexed_answer']:,} queries have no "
            "relevant document in it and score 0. Scores of an index of part of the corpus "
            "compare with nothing else.",
            file=sys.stderr,
        )

    with running_service(options.indexes, options.index, options.pair) as server:
        started = time.perf_counter()
        run = search_run(server.url, queries, _TOP_K)
        seconds = time.perf_counter() - started
    scores = {
        f"{load_pair(options.pair).name}, {manifest.factory}, HTTP": score(qrels, run),
        f"BM25 (bm25s, jieba, k1 {K1}, b {B})": score(qrels, bm25_run(chunks, queries, _TOP_K)),
    }
    count = manifest.corpus.documents
    print(f"{len(queries):,} judged queries, {count:,} documents, {manifest.version}")
    _print_table(scores)
    print(f"{len(queries) / seconds:,.0f} queries/s in batches, one client")
    if options.output:
        result = {
            "scores": scores,
            "coverage": coverage,
            "index": {"name": manifest.name, "version": manifest.version},
            "encoder": manifest.encoder.model_dump(),
            "corpus_checksum": manifest.corpus.checksum,
            "queries_sha256": sha256_file(options.queries),
            "qrels_sha256": sha256_file(options.qrels),
            "top_k": _TOP_K,
            **environment("faiss", "onnxruntime", "tokenizers"),  # those of the service
        }
        write_json(options.output, result)


def judgement_coverage(qrels: Qrels, chunks: Iterable[Document]) -> dict[str, int]:
    """Counts judged documents, and those that an index lacks, given its documents or chunks.

    Queries none of whose relevant documents is in it are counted too: they can only score 0.
    """
    indexed = {chunk.parent or chunk.id for chunk in chunks}
    judged = {id_ for grades in qrels.values() for id_ in grades}
    return {
        "judged_documents": len(judged),
        "judged_documents_not_indexed": len(judged - indexed),
        "queries_without_indexed_answer": sum(
            not any(grade > 0 and id_ in indexed for id_, grade in grades.items())
            for grades in qrels.values()
        ),
    }


def _print_table(scores: dict[str, dict[str, float]]) -> None:
    width = max(map(len, scores))
    print(f"{'':{width}}  " + "  ".join(f"{name:>10}" for name in MEASURES))
    for system, values in scores.items():
        print(f"{system:{width}}  " + "  ".join(f"{values[name]:>10.4f}" for name in MEASURES))


if __name__ == "__main__":
    sys.exit(main())
