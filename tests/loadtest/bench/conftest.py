import json
import os
from pathlib import Path

import pytest

from indexer.build import BuildOptions, build
from loadtest.bench.results import ServiceOptions
from models.encoders.onnx import OnnxEncoder
from models.pairs import load_pair
from tests.conftest import make_records, write_jsonl

ERRORS = {"status": 0, "connect": 0, "read": 0, "write": 0, "timeout": 0}
SUMMARY = {"seconds": 2.0, "requests": 200, "errors": ERRORS}
SUMMARY |= {"p50_ms": 1.5, "p90_ms": 2.5, "p99_ms": 3.5, "max_ms": 9.0}


@pytest.fixture
def wrk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script that replaces wrk and prints a summary."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    script = folder / "wrk"
    script.write_text(f"#!/bin/sh\necho '{json.dumps(SUMMARY)}'\n")
    script.chmod(0o755)
    return script


@pytest.fixture(scope="session")
def options(tmp_path_factory: pytest.TempPathFactory) -> ServiceOptions:
    """Options for a small index of `care-mini`, and questions."""
    folder = tmp_path_factory.mktemp("bench")
    pair = load_pair("care-mini")
    corpus = write_jsonl(folder / "corpus.jsonl", make_records(20))
    queries = write_jsonl(folder / "queries.jsonl", [{"text": f"问题{i}"} for i in range(3)])
    places = {"indexes": folder / "indexes", "builds": folder / "builds"}
    settings = BuildOptions(str(corpus), "test", **places, factory="HNSW8", progress=False)
    build(settings, *(OnnxEncoder(spec, pair.folder, 1) for spec in (pair.document, pair.query)))
    return ServiceOptions(
        indexes=places["indexes"],
        index="test",
        queries=queries,
        out=folder,
        seconds=1,
        rounds=1,
        top_k=3,
    )
