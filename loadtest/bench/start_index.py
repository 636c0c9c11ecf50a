"""A pair and a published index version of the size wanted, for measuring the start.

The index is the HNSW,SQ8 graph that `scale` built over synthetic vectors, and 16 documents
more: the canaries, whose vectors are real. The pair is care-mini with one matrix product
behind it, which takes its 384 dimensions to the index's and its mean to the mean of the
synthetic vectors: the start loads the same tokenizer and nearly the same weights.
"""

import json
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import version as library_version
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from core import documents, filters
from core.canaries import choose_canaries, make_canaries
from core.documents import DocumentWriter
from core.files import atomic, sha256_file
from core.filters import FilterWriter
from core.text import document_text
from core.types import (
    SCHEMA_VERSION,
    CorpusRecord,
    Document,
    EncoderSpec,
    FileRecord,
    FloatArray,
    IndexManifest,
    RecallReport,
)
from core.versions import MANIFEST, VECTORS, list_versions, set_current
from indexer.faiss_index import write_index
from indexer.verify import verify_version
from loadtest.bench.engines import FaissEngine, K
from loadtest.bench.scale import Options, recall
from models.encoders.onnx import OUTPUT, OnnxEncoder
from models.pairs import load_pair

SAMPLE = Path("data/sample/corpus.jsonl")

_BASE_PAIR = "care-mini"
_SPACE = "synthetic"
_EF_SEARCH = 128
_LIBRARIES = ("faiss-cpu", "numpy", "onnxruntime", "pyarrow", "tokenizers")


def make_pair(folder: Path, mean: FloatArray, seed: int) -> Path:
    """Writes a pair whose vectors lie around `mean`, float32 [dimension]; returns its TOML."""
    path = folder / "pair.toml"
    if path.is_file():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    base = load_pair(_BASE_PAIR)
    spec, texts = base.query, [text for _, text in _sample_texts()]
    encoder = OnnxEncoder(spec, base.folder, threads=1)
    centre = np.concatenate([encoder.encode([text]).vectors for text in texts]).mean(axis=0)
    rotation = np.linalg.qr(
        np.random.default_rng(seed).standard_normal((len(mean), spec.dimension))
    )[0].T.astype(np.float32)
    weights, tokenizer = folder / "query.onnx", folder / "tokenizer.json"
    _project(base.folder / spec.weights, weights, rotation, mean - centre @ rotation)
    shutil.copyfile(base.folder / spec.tokenizer, tokenizer)
    facts = {
        **spec.model_dump(exclude={"role", "embedding_space"}),
        "weights": weights.name,
        "weights_sha256": sha256_file(weights),
        "tokenizer": tokenizer.name,
        "dimension": len(mean),
        "native_dimension": len(mean),
    }
    table = "".join(f"{key} = {json.dumps(value)}\n" for key, value in facts.items())
    path.write_text(
        f'name = "{_SPACE}"\ndescription = "care-mini in {len(mean)} dimensions"\n'
        f'embedding_space = "{_SPACE}"\n\n[query]\n{table}\n[document]\n{table}',
        encoding="utf-8",
    )
    return path


def make_index(options: Options, pair_path: Path, indexes: Path) -> str:
    """Publishes the version, unless it is there; returns the index's name.

    Raises:
        FileNotFoundError: If `scale` has not built the graph yet.
        CareError: If the version does not verify.
    """
    name = f"start-{options.vectors}"
    if list_versions(indexes, name):
        return name
    pair = load_pair(str(pair_path))
    encoder = OnnxEncoder(pair.document, pair.folder, threads=1)
    engine = FaissEngine(f"HNSW{options.links},SQ8", options.construction)
    graph = options.folder / engine.name.replace(" ", "-").replace(",", "-")
    index = faiss.read_index(str(graph))
    queries = np.load(options.folder / f"queries-{options.queries}.npy")
    truth = np.load(options.folder / f"truth-{options.queries}.npy")
    parameters = faiss.SearchParametersHNSW(efSearch=_EF_SEARCH)
    reached = recall(index.search(queries, K, params=parameters)[1], truth)

    sample = [document_text(title, text) for title, text in _sample_texts()]
    chosen = choose_canaries([len(text) for text in sample])
    texts = [sample[i] for i in chosen]
    vectors = np.concatenate([encoder.encode([text]).vectors for text in texts])
    index.add(vectors)

    folder = indexes / name / f"{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}-00000000"
    folder.mkdir(parents=True)
    write_index(index, folder / VECTORS)
    fields = _write_documents(folder, index.ntotal - len(chosen), chosen)
    manifest = IndexManifest(
        schema_version=SCHEMA_VERSION,
        name=name,
        version=folder.name,
        encoder=EncoderSpec(**pair.document.model_dump()),
        metric="cosine",
        factory=f"HNSW{options.links},SQ8",
        search_parameters={"efSearch": _EF_SEARCH},
        count=index.ntotal,
        filter_fields=fields,
        files={
            path.name: FileRecord(bytes=path.stat().st_size, sha256=sha256_file(path))
            for path in sorted(folder.iterdir())
        },
        corpus=CorpusRecord(
            checksum="0" * 64,
            files=["synthetic"],
            documents=index.ntotal,
            unique_texts=index.ntotal,
            rejected=0,
            truncated=0,
            tokens=0,
        ),
        recall=RecallReport(
            k=K,
            queries=len(queries),
            source="synthetic",
            target=reached,
            recall=reached,
            tried={str(_EF_SEARCH): reached},
        ),
        canaries=make_canaries(texts, vectors),
        created_at=datetime.now(UTC),
        build_seconds=json.loads(graph.with_name(f"{graph.name}.json").read_text())["seconds"],
        libraries={library: library_version(library) for library in _LIBRARIES},
    )
    with atomic(folder / MANIFEST) as path:
        path.write_text(manifest.model_dump_json(indent=2), encoding="utf-8")
    verify_version(folder)
    set_current(indexes, name, folder.name)
    return name


def _write_documents(folder: Path, count: int, canaries: list[int]) -> dict[str, int]:
    """Writes `count` documents and the canaries after them; returns values of each field."""
    records = _sample_records()
    with (
        FilterWriter(folder / filters.FILE_NAME) as filter_writer,
        DocumentWriter(folder / documents.FILE_NAME) as writer,
    ):
        for row in range(count + len(canaries)):
            record = records[row % len(records)] if row < count else records[canaries[row - count]]
            metadata = {**record["metadata"], "year": 2000 + row % 25}
            title = record["title"] if row >= count else f"{record['title']}（{row}）"
            writer.write(Document(f"d{row}", record["text"], title, metadata))
            filter_writer.add(row, metadata)
    return filter_writer.fields()


def _sample_records() -> list[dict[str, Any]]:
    lines = SAMPLE.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def _sample_texts() -> Iterator[tuple[str, str]]:
    for record in _sample_records():
        yield record["title"], record["text"]


def _project(source: Path, target: Path, rotation: FloatArray, offset: FloatArray) -> None:
    """Puts `vector @ rotation + offset` behind a model's output."""
    import onnx
    from onnx import helper, numpy_helper

    model = onnx.load(source)
    inner = f"{OUTPUT}_inner"
    for node in model.graph.node:
        node.output[:] = [inner if name == OUTPUT else name for name in node.output]
        node.input[:] = [inner if name == OUTPUT else name for name in node.input]
    model.graph.node.append(helper.make_node("Gemm", [inner, "rotation", "offset"], [OUTPUT]))
    model.graph.initializer.extend(
        [
            numpy_helper.from_array(rotation.astype(np.float32), "rotation"),
            numpy_helper.from_array(offset.astype(np.float32), "offset"),
        ]
    )
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = rotation.shape[1]
    onnx.save(model, target)
