"""Start time of the service, and memory of a second process with the same index.

The index is the graph of reduced vectors that the scale benchmark leaves in the cache, plus the
vectors of the sample corpus, which provide real canaries, with full text. The pair is the default
pair with a matrix product after its query encoder, which maps its vectors to the index's
dimensions, their mean and principal axes to those of the synthetic vectors. The service thus loads
the same tokenizer and nearly the same weights as usual.
"""

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median

import faiss
import numpy as np

from core import documents, filters
from core.encoders import Pair
from core.errors import CareError
from core.files import sha256_file, sync
from core.manifest import FULL_TEXT, VECTORS_FILE, FileRecord
from core.service_process import running_service
from core.types import FloatArray
from core.versions import IndexFolder, write_manifest
from indexer.build import BuildOptions, build
from loadtest.bench import results
from loadtest.bench.engines import faiss_engine
from loadtest.bench.options import ScaleOptions, StartOptions
from loadtest.bench.processes import Server, anonymous_bytes, options_json
from loadtest.traffic import read_texts
from models.encoders.onnx import OUTPUT, OnnxEncoder
from models.pairs import DEFAULT_PAIR, load_pair, write_pair
from stores.lexical import write_full_text

_SAMPLE = Path("data/sample/corpus.jsonl")
# Of the graph at recall@10 ≥ 0.95 with a million vectors (loadtest/results).
_SEARCH = {"efSearch": 192, "k_factor": 4}
_SEARCHES = 200

_log = logging.getLogger(__name__)


def run(options: StartOptions) -> None:
    """Measures and writes `start-<vectors>.json`."""
    if not _graph(options).is_file():
        message = (
            f"{_graph(options)} is missing: run make bench-scale VECTORS={options.vectors} first"
        )
        raise CareError(message, code="graph_missing", path=_graph(options))
    _log.info("pair and index of %d documents", options.vectors)
    if not options.pair.is_file():
        make_pair(options)
    if not (options.index / "CURRENT").is_file():
        make_index(options)
    folder = options.index / IndexFolder(options.index.parent, options.index.name).active()
    queries = [text[:40] for text in read_texts(_SAMPLE)[:_SEARCHES]]
    _log.info("starts")
    for path in _files(folder):
        sync(path)
        with path.open("rb") as file:  # drops the file's pages from the page cache
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with _service(options) as (_, cold):
        pass
    warm, worked = [], []
    for _ in range(options.starts):
        with _service(options) as (server, seconds):
            warm.append(round(seconds, 3))
            worked.append(server.cpu())
    _log.info("cold %.2f s, warm %s s, CPU %s s", cold, warm, worked)
    with _service(options) as (first, _), _service(options) as (second, _):
        at_ready = _memory(second)
        before = [_hits(server, query) for query in queries for server in (first, second)]
        memory = {"second_at_ready": at_ready, "second": _memory(second), "first": _memory(first)}
        first.process.kill()
        first.process.wait()
        with _service(options) as (again, after_kill):
            same = before[::2] == [_hits(again, query) for query in queries]
            killed = {"same_hits": same, "memory": _memory(again)}
    ready = (
        f"median of {len(warm)} starts, {median(worked):.2f} s of CPU time; "
        f"{cold:.2f} s with a cold page cache; {after_kill:.2f} s after SIGKILL"
    )
    resident, private = (memory["second"][f"{n}_bytes"] / 1e6 for n in ("resident", "private"))
    shared = f"after {len(queries)} searches; resident {resident:.0f} MB"
    result = {
        "benchmark": "start",
        "environment": results.describe(),
        "figures": [
            results.figure("process start to ready", median(warm), "<=", 2.0, "s", ready),
            results.figure("private memory of a second process", private, "<=", 300, "MB", shared),
        ],
        "options": options_json(options),
        "documents": options.vectors,
        "factory": factory(options),
        "index_bytes": {str(f.relative_to(folder)): f.stat().st_size for f in _files(folder)},
        "ready_seconds": {
            "warm": warm,
            # CPU time of all threads, which other processes on the machine hardly affect.
            "warm_processor": worked,
            "files_not_in_memory": round(cold, 3),
            "after_sigkill": round(after_kill, 3),
        },
        "memory_after_searches": {"searches": len(queries), **memory},
        "after_sigkill": killed,
    }
    _log.info("wrote %s", results.write(result, options.out / f"start-{options.vectors}.json"))


def make_pair(options: StartOptions) -> None:
    """Writes a pair whose vectors have the mean and the principal axes of the synthetic vectors.

    A graph of reduced vectors would find no others.
    """
    synthetic = np.load(options.folder / "documents.npy", mmap_mode="r")[:10_000]
    base, folder = load_pair(DEFAULT_PAIR), options.pair.parent
    folder.mkdir(parents=True, exist_ok=True)
    encoder = OnnxEncoder(base.query, base.folder, threads=1)
    sample = np.concatenate([encoder.encode([text]).vectors for text in read_texts(_SAMPLE)])
    mean, centre = synthetic.mean(axis=0), sample.mean(axis=0)
    rotation = _axes(sample - centre).T @ _axes(synthetic - mean)[: base.query.dimension]
    weights = base.folder / base.query.weights
    _project(weights, folder / "query.onnx", rotation, mean - centre @ rotation)
    changes = {
        "weights": "query.onnx",
        "weights_sha256": sha256_file(folder / "query.onnx"),
        "tokenizer": str((base.folder / base.query.tokenizer).resolve()),
        "dimension": options.dimension,
        "native_dimension": options.dimension,
        "embedding_space": "synthetic",
    }
    query = base.query.model_copy(update=changes)
    document = query.model_copy(update={"role": "document"})
    about = f"{base.name} in {options.dimension} dimensions"
    pair = Pair(name="synthetic", description=about, folder=folder, query=query, document=document)
    write_pair(pair, options.pair)


def make_index(options: StartOptions) -> None:
    """Publishes an index of the synthetic vectors, followed by those of the sample corpus.

    The service verifies the version when it starts.
    """
    pair = load_pair(str(options.pair))
    document, query = (OnnxEncoder(s, pair.folder, 1) for s in (pair.document, pair.query))
    root, name, builds = options.index.parent, options.index.name, options.cache / "builds"
    settings = BuildOptions(str(_SAMPLE), f"{name}-sample", root, builds, progress=False)
    manifest, _ = build(settings, document, query)
    small, folder = root / settings.name / manifest.version, options.index / manifest.version
    index = faiss.read_index(str(_graph(options)))
    index.add(faiss.read_index(str(small / VECTORS_FILE)).reconstruct_n(0, manifest.count))
    folder.mkdir(parents=True)
    faiss.write_index(index, str(folder / VECTORS_FILE))
    sample = list(documents.DocumentReader(small / documents.FILE_NAME))
    with (
        filters.FilterWriter(folder / filters.FILE_NAME) as by_value,
        documents.DocumentWriter(folder / documents.FILE_NAME) as writer,
    ):
        for row in range(index.ntotal):
            copy = sample[(row - options.vectors) % len(sample)]
            if row < options.vectors:
                metadata = {**copy.metadata, "year": 2000 + row % 25}
                title = f"{copy.title}（{row}）"
                copy = replace(copy, id=f"d{row}", title=title, metadata=metadata)
            writer.write(copy)
            by_value.add(row, copy.metadata)
    files = _files(folder)
    written = documents.DocumentReader(folder / documents.FILE_NAME)
    labels = filters.FilterReader(folder / filters.FILE_NAME, by_value.fields(), index.ntotal)
    counts = {"documents": index.ntotal, "unique_texts": index.ntotal}
    changes = {
        "name": name,
        "factory": factory(options),
        "search_parameters": _SEARCH,
        "count": index.ntotal,
        "filter_fields": by_value.fields(),
        "components": {FULL_TEXT: write_full_text(folder, written, labels)},
        "files": {f.name: FileRecord(bytes=f.stat().st_size, sha256=sha256_file(f)) for f in files},
        "corpus": manifest.corpus.model_copy(update=counts),
    }
    write_manifest(folder, manifest.model_copy(update=changes))
    IndexFolder(root, name).set_active(folder.name)


def factory(options: ScaleOptions) -> str:
    """Returns the type of the graph."""
    return f"PCA{options.dimension // 4},HNSW{options.links},SQ8,Refine(SQ8)"


def _graph(options: StartOptions) -> Path:
    """Returns the graph of the synthetic vectors, which `care bench scale` builds."""
    engine = faiss_engine(factory(options), options.construction)
    return options.folder / engine.file_name


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@contextmanager
def _service(options: StartOptions) -> Iterator[tuple[Server, float]]:
    """Runs the service until the block ends; yields it and its start time [s]."""
    index, settings = options.index, {"THREADS": str(options.threads), "CACHE_ENTRIES": "0"}
    started = time.perf_counter()
    with running_service(index.parent, index.name, str(options.pair), **settings) as process:
        server = Server(process)
        server.get("/health/ready")
        yield server, time.perf_counter() - started


def _axes(vectors: FloatArray) -> FloatArray:
    """Returns the principal axes of centred vectors, by descending variance: float32 [d, d]."""
    axes: FloatArray = np.linalg.eigh(vectors.T @ vectors).eigenvectors.T[::-1]
    return axes


def _project(source: Path, target: Path, rotation: FloatArray, offset: FloatArray) -> None:
    """Appends `vector @ rotation + offset` to a model's output."""
    import onnx
    from onnx import helper, numpy_helper

    model = onnx.load(source)
    model.graph.node[-1].output[:] = ["inner"]
    model.graph.node.append(helper.make_node("Gemm", ["inner", "rotation", "offset"], [OUTPUT]))
    weights = {"rotation": rotation, "offset": offset.astype(np.float32)}
    model.graph.initializer.extend(numpy_helper.from_array(w, name) for name, w in weights.items())
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = rotation.shape[1]
    onnx.save(model, target)


def _hits(server: Server, query: str) -> list[str]:
    return [hit["id"] for hit in server.post("/search", {"query": query})["hits"]]


def _memory(server: Server) -> dict[str, int]:
    """Returns memory [bytes]: resident (RSS), private (USS), and anonymous."""
    found, own = server.process.memory_full_info(), anonymous_bytes(server.process.pid)
    return {"resident_bytes": found.rss, "private_bytes": found.uss, "anonymous_bytes": own}
