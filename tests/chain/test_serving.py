"""From exported pairs to served answers: indexes encoded by vLLM, the service, and its score."""

import json
import urllib.request
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest

import care
from core.documents import FILE_NAME, DocumentReader
from core.service_process import running_service
from core.versions import IndexFolder
from evaluation.beir import beir_paths, read_judged_queries
from evaluation.dense import dense_run
from evaluation.index_evaluation import TOP_K
from evaluation.metrics import score
from models.encoders.transformers import TransformersEncoder
from tests.chain.conftest import FOLDER, PAIRS, VARIABLES, WIDTHS, Steps
from tests.checkpoints import checkpoint_spec

pytestmark = [pytest.mark.train, pytest.mark.timeout(900)]

BENCHMARK = beir_paths(FOLDER / "data" / "benchmark" / "retrieval", "test")
INDEXES = Path(VARIABLES["CARE_INDEXES"])


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)


def indexed(name: str) -> tuple[list[dict[str, str]], Any]:
    """Returns the documents of an index and their vectors, float32 [n, dimension]."""
    folder = IndexFolder(INDEXES, name).path / IndexFolder(INDEXES, name).active()
    documents = list(DocumentReader(folder / FILE_NAME))
    vectors = faiss.read_index(str(folder / "vectors.faiss")).reconstruct_n(0, len(documents))
    return [{"_id": d.id, "title": d.title, "text": d.text} for d in documents], vectors


def ask(url: str, query: str, top_k: int) -> list[dict[str, Any]]:
    body = json.dumps({"query": query, "top_k": top_k}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/search", body, headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        hits: list[dict[str, Any]] = json.load(response)["hits"]
    return hits


@pytest.mark.parametrize("name", PAIRS)
def test_vllm_builds_an_index_that_is_verified(steps: Steps, name: str) -> None:
    words = ["index", str(BENCHMARK.corpus), "--index", name, "--pair", name, "--backend", "vllm"]
    steps.care(*words, name=f"index {name} by vLLM")
    steps.care("versions", "verify", "--index", name)


@pytest.mark.parametrize("name", PAIRS)
def test_vectors_of_vllm_are_those_of_transformers(steps: Steps, name: str) -> None:
    documents, vectors = indexed(name)
    expected = care.load_pair(name, backend="transformers").encode_documents(documents)
    lowest = (vectors * expected).sum(axis=1).min()
    steps.add(f"vLLM beside transformers, {name}", None, f"lowest cosine {lowest:.7f}")
    assert lowest >= 0.9999


@pytest.mark.parametrize("name", PAIRS)
def test_answers_over_http_are_those_of_exact_search(steps: Steps, name: str) -> None:
    queries, _ = read_judged_queries(BENCHMARK.queries, BENCHMARK.qrels)
    documents, _ = indexed(name)
    pair = care.load_pair(name, backend="transformers")
    exact = pair.encode_queries(list(queries.values())) @ pair.encode_documents(documents).T
    rows = {document["_id"]: row for row, document in enumerate(documents)}
    with running_service(INDEXES, name, name) as server:
        for query, scores in zip(queries.values(), exact, strict=True):
            hits = ask(server.url, query, 10)
            np.testing.assert_allclose(
                [hit["score"] for hit in hits], np.sort(scores)[:-11:-1], atol=1e-3
            )
            found = scores[[rows[hit["id"]] for hit in hits]]
            np.testing.assert_allclose([hit["score"] for hit in hits], found, atol=1e-3)
    steps.add(f"POST /search, {name}", None, f"{len(queries)} questions answered exactly")


@pytest.mark.parametrize("name", PAIRS)
def test_the_served_score_exceeds_that_before_training(steps: Steps, name: str) -> None:
    files = ["--queries", str(BENCHMARK.queries), "--qrels", str(BENCHMARK.qrels)]
    words = ["evaluate", "--index", name, "--pair", name, *files]
    result = steps.care(*words, name=f"evaluate {name}")
    after = result["scores"]["dense"]["nDCG@10"]
    before = untrained(name)
    steps.add(f"  nDCG@10, {name}", None, f"untrained {before:.3f}, served {after:.3f}")
    assert after > before


def untrained(name: str) -> float:
    """Returns nDCG@10 of the checkpoints that training started from."""
    queries, qrels = read_judged_queries(BENCHMARK.queries, BENCHMARK.qrels)
    documents, _ = indexed(name)
    texts = {document["_id"]: document["text"] for document in documents}
    start = FOLDER / "start"
    query = checkpoint_spec(start / "query", "cls", max_length=512, role="query")
    facts = {"native_dimension": WIDTHS[name], "dimension": query.dimension, "max_length": 512}
    document = checkpoint_spec(start / name, **facts)
    vectors = [
        TransformersEncoder(spec, Path(), device="cpu", dtype="float32").encode(list(read.values()))
        for spec, read in ((query, queries), (document, texts))
    ]
    run = dense_run(queries, vectors[0].vectors, texts, vectors[1].vectors, TOP_K)
    return score(qrels, run)["nDCG@10"]
