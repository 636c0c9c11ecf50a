"""A trained pair in export, index and service."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient
from sentence_transformers import SentenceTransformer

from care.cli.main import main as care
from models.encoders.onnx import OnnxEncoder
from models.encoders.transformers import TransformersEncoder
from models.pairs import load_pair
from service.app import create_app, load_query_encoder
from service.settings import Settings
from tests.checkpoints import LONG, TEXTS
from tests.conftest import write_jsonl
from tests.training.conftest import DATA, RunRecipe, align, pair_of, teacher

pytestmark = pytest.mark.train


def test_a_trained_pair_has_the_same_vectors_after_export_and_in_the_service(
    base: dict[str, Any], run_recipe: RunRecipe, tmp_path: Path, settings: Settings
) -> None:
    base["document"] |= {"lora": {"r": 4, "alpha": 8}}
    prompt = base["document"]["prompts"]["document"]
    large = {"kind": "contrastive", "side": "document", "data": DATA, "batch": 3}
    prompts = {"query": prompt, "document": prompt}
    # Enough epochs for texts to find their own vectors: the service checks the canaries.
    aligned = align(epochs=60, batch=6, learning_rate=3e-3, dropout=0.0)
    base["stages"] = [large, teacher(prompts=prompts), aligned]
    trained = pair_of(run_recipe(base))
    assert trained.document.adapter
    records = [{"_id": f"d{i}", "text": text} for i, text in enumerate(TEXTS)]
    corpus, out = write_jsonl(tmp_path / "corpus.jsonl", records), tmp_path / "exported"
    arguments = ["--pair", str(trained.folder / "pair.toml"), "--out", str(out), "--threads", "1"]
    arguments += ["--precision", "fp32", "--corpus", "none", "--document", "merged"]
    assert care(["export", *arguments]) == 0

    query, document = (
        TransformersEncoder(spec, trained.folder, device="cpu")
        for spec in (trained.query, trained.document)
    )
    pair = load_pair(str(out / "pair.toml"))
    queries = [*TEXTS, *(a + b for a, b in pairwise(TEXTS)), LONG]
    vectors = query.encode(queries).vectors
    # The folder defines pooling and normalisation without the pair's TOML file.
    alone = SentenceTransformer(str(trained.folder / trained.query.weights), device="cpu")
    np.testing.assert_allclose(alone.encode(queries, prompt_name="query"), vectors, atol=1e-4)
    graph = OnnxEncoder(pair.query, out, threads=1)
    np.testing.assert_allclose(graph.encode(queries).vectors, vectors, atol=1e-4)

    arguments = [str(corpus), "--index", "test", "--indexes", str(settings.indexes)]
    arguments += ["--builds", str(tmp_path / "builds"), "--pair", str(out / "pair.toml")]
    assert care(["index", *arguments, "--backend", "transformers"]) == 0

    scores = vectors @ document.encode(TEXTS).vectors.T
    served = settings.model_copy(update={"pair": str(out / "pair.toml")})
    with TestClient(create_app(served, load_query_encoder(served))) as client:
        for text, expected in zip(queries, scores, strict=True):
            response = client.post("/search", json={"query": text, "top_k": len(TEXTS)})
            assert response.status_code == 200, response.text
            hits = response.json()["hits"]
            found = [expected[int(hit["id"].removeprefix("d"))] for hit in hits]
            np.testing.assert_allclose([hit["score"] for hit in hits], found, atol=2e-4)
            np.testing.assert_allclose(found, np.sort(expected)[::-1], atol=2e-4)
