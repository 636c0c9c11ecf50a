from pathlib import Path

import numpy as np
import pytest

from core.manifest import FULL_TEXT
from core.types import Query
from core.versions import IndexFolder
from loadtest.bench import start
from loadtest.bench.engines import faiss_engine
from loadtest.bench.options import StartOptions
from loadtest.bench.vectors import SyntheticVectors, write_vectors
from models.encoders.onnx import OnnxEncoder
from models.pairs import load_pair
from search.snapshot import load_index
from search.task import SearchTask, encode

pytestmark = pytest.mark.train

VECTORS, DIMENSION, DOCUMENTS = 400, 448, 20


def test_the_version_of_synthetic_vectors_has_all_that_a_service_checks_and_searches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = tmp_path / "corpus.jsonl"
    lines = start._SAMPLE.read_text().splitlines(keepends=True)[:DOCUMENTS]
    sample.write_text("".join(lines))
    monkeypatch.setattr(start, "_SAMPLE", sample)
    options = StartOptions(vectors=VECTORS, dimension=DIMENSION, cache=tmp_path / "cache")
    options.folder.mkdir(parents=True)
    vectors = options.folder / "documents.npy"
    write_vectors(SyntheticVectors(VECTORS, DIMENSION), vectors)
    engine = faiss_engine(start.factory(options), construction=40)
    engine.build(np.load(vectors), 1, options.folder / engine.file_name)
    start.make_pair(options)
    start.make_index(options)
    pair = load_pair(str(options.pair))
    encoder = OnnxEncoder(pair.query, pair.folder, threads=1)
    snapshot = load_index(IndexFolder(options.index.parent, options.index.name), encoder)
    assert (
        snapshot.manifest.version == IndexFolder(options.index.parent, options.index.name).active()
    )
    assert snapshot.manifest.count == VECTORS + DOCUMENTS
    assert FULL_TEXT in snapshot.manifest.components
    text = snapshot.segment.documents.text(VECTORS)
    task = SearchTask(snapshot=snapshot, query=Query(text, top_k=3, mode="hybrid"))
    encode([task], encoder)
    found = task.search()
    assert len(found.hits) == 3
    assert not found.failed
