"""What a start consists of: the service's own steps, each timed, in a fresh process.

python -P loadtest/bench/start_stages.py PAIR VERSION_FOLDER

Prints JSON: for each step wall-clock and processor seconds.
"""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

seconds: dict[str, tuple[float, float]] = {}


@contextmanager
def _step(name: str) -> Iterator[None]:
    started, worked = time.perf_counter(), time.process_time()
    yield
    seconds[name] = (
        round(time.perf_counter() - started, 4),
        round(time.process_time() - worked, 4),
    )


def main() -> None:
    """Runs the steps in the service's order."""
    pair_path, folder = sys.argv[1], Path(sys.argv[2])
    with _step("import of the service"):
        import service.__main__  # noqa: F401
    import faiss
    from tokenizers import Tokenizer

    from core import documents, filters, versions
    from core.canaries import check_canaries
    from core.documents import DocumentReader
    from core.files import sha256_file
    from core.filters import FilterReader
    from models.encoders.onnx import OnnxEncoder
    from models.pairs import load_pair

    pair = load_pair(pair_path)
    weights, tokenizer = pair.folder / pair.query.weights, pair.folder / pair.query.tokenizer
    with _step("checksums of weights and tokenizer"):
        sha256_file(weights)
        sha256_file(tokenizer)
    with _step("tokenizer"):
        Tokenizer.from_file(str(tokenizer))
    with _step("encoder, with its checksums and tokenizer"):
        encoder = OnnxEncoder(pair.query, pair.folder, threads=2)
    with _step("manifest"):
        manifest = versions.read_manifest(folder)
    with _step("checksums of the index"):
        versions.verify_files(folder, manifest)
    with _step("canaries"):
        check_canaries(encoder, manifest.canaries)
    with _step("documents"):
        DocumentReader(folder / documents.FILE_NAME)
    with _step("filters"):
        FilterReader(folder / filters.FILE_NAME, manifest.filter_fields)
    with _step("map of the vectors"):
        faiss.read_index(str(folder / versions.VECTORS), faiss.IO_FLAG_MMAP_IFC)
    sys.stdout.write(json.dumps(seconds))


if __name__ == "__main__":
    main()
