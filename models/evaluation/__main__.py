"""`python -m models.evaluation`: score an index over HTTP, beside BM25 on the same documents."""

import argparse
import json
import platform
import sys
import time
from importlib.metadata import version
from pathlib import Path

from core import documents
from core.documents import DocumentReader
from core.errors import CareError
from core.files import sha256_file, write_text
from core.versions import current_version, index_folder, read_manifest
from models.evaluation.beir import read_qrels, read_queries
from models.evaluation.bm25 import K1, B, bm25_run
from models.evaluation.chunks import chunk_depth, document_run
from models.evaluation.http import running_service, search_run
from models.evaluation.scores import MEASURES, score
from models.pairs import DEFAULT_PAIR, load_pair

_TOP_K = 100
_LIBRARIES = ("bm25s", "faiss-cpu", "ir-measures", "jieba", "numpy", "onnxruntime", "tokenizers")


def main() -> int:
    """Runs the command; returns 1 for a user's error."""
    try:
        _evaluate(_parser().parse_args())
    except CareError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m models.evaluation",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--indexes", default="indexes", help="folder of the indexes")
    parser.add_argument("--index", required=True, help="name of the index")
    parser.add_argument("--pair", default=DEFAULT_PAIR, help="pair whose query encoder is used")
    parser.add_argument("--queries", type=Path, required=True, help="JSONL with _id and text")
    parser.add_argument("--qrels", type=Path, required=True, help="TSV: query-id corpus-id score")
    parser.add_argument("--output", type=Path, help="also write the scores as JSON")
    return parser


def _evaluate(options: argparse.Namespace) -> None:
    qrels = read_qrels(options.qrels)
    every = read_queries(options.queries)
    missing = qrels.keys() - every.keys()
    if missing:
        raise CareError(f"{options.qrels} judges '{min(missing)}', which {options.queries} lacks")
    queries = {id_: every[id_] for id_ in qrels}
    root = Path(options.indexes)
    folder = index_folder(root, options.index) / current_version(root, options.index)
    manifest = read_manifest(folder)

    with running_service(options.indexes, options.index, options.pair) as url:
        started = time.perf_counter()
        run = search_run(url, queries, _TOP_K)
        seconds = time.perf_counter() - started
    chunks = DocumentReader(folder / documents.FILE_NAME)
    baseline = bm25_run(chunks, queries, chunk_depth(chunks, _TOP_K))
    baseline = document_run(baseline, chunks, _TOP_K)
    scores = {
        f"{load_pair(options.pair).name}, {manifest.factory}, HTTP": score(qrels, run),
        f"BM25 (bm25s, jieba, k1 {K1}, b {B})": score(qrels, baseline),
    }
    count = manifest.corpus.documents
    print(f"{len(queries):,} judged queries, {count:,} documents, {manifest.version}")
    _print_table(scores)
    print(f"{len(queries) / seconds:,.0f} queries/s in batches, one client")
    if options.output:
        result = {
            "scores": scores,
            "index": {"name": manifest.name, "version": manifest.version},
            "encoder": manifest.encoder.model_dump(),
            "corpus_checksum": manifest.corpus.checksum,
            "queries_sha256": sha256_file(options.queries),
            "qrels_sha256": sha256_file(options.qrels),
            "top_k": _TOP_K,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "libraries": {name: version(name) for name in _LIBRARIES},
        }
        write_text(options.output, json.dumps(result, ensure_ascii=False, indent=2) + "\n")


def _print_table(scores: dict[str, dict[str, float]]) -> None:
    width = max(map(len, scores))
    print(f"{'':{width}}  " + "  ".join(f"{name:>10}" for name in MEASURES))
    for system, values in scores.items():
        print(f"{system:{width}}  " + "  ".join(f"{values[name]:>10.4f}" for name in MEASURES))


if __name__ == "__main__":
    sys.exit(main())
