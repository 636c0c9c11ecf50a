"""The service beside its bare loop and other systems, with a script that replaces wrk."""

import os
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from core.errors import CareError
from loadtest.bench import peers
from loadtest.bench.peers import HIDDEN_STATES
from loadtest.bench.results import ServiceOptions
from loadtest.traffic import SAMPLE, read_texts
from models.encoders.onnx import OnnxEncoder
from models.pairs import load_pair
from tests.errors import raises

TEXTS = read_texts(SAMPLE)[:12]


def test_the_loop_searches_an_index(options: ServiceOptions) -> None:
    found = peers.loop(options, batch=2, sessions=2, threads=1, seconds=0.01)
    assert found["qps"] > 0
    assert found["p50_ms"] > 0


@pytest.mark.e2e
@pytest.mark.usefixtures("wrk")
def test_the_service_is_measured_beside_the_bare_loop(
    options: ServiceOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "_BATCHES", (2,))
    found = peers.bare_loop(options)
    (entry,) = found["rounds"]
    ratio, added = (figure["reached"] for figure in found["figures"])
    assert ratio == entry["ratio"] == 100.0 / entry["bare_qps"]
    assert added == entry["added_ms"] == 1.5 - entry["bare_p50_ms"]


@pytest.mark.e2e
@pytest.mark.usefixtures("wrk")
def test_cache_hits_are_measured_beside_a_plain_application(options: ServiceOptions) -> None:
    found = peers.fastapi(options)
    assert [figure["reached"] for figure in found["figures"]] == [1.0, 1.0]
    assert [entry["clients"] for entry in found["rounds"]] == [1, 32]


@pytest.mark.e2e
@pytest.mark.train
@pytest.mark.usefixtures("wrk")
def test_another_system_is_measured_at_two_numbers_of_clients(
    options: ServiceOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "PYTHONS", (Path(sys.executable),) * 2)
    found = peers.sentence_transformers(options)
    assert 0.99 < min(found["cosines"]) < 0.99999
    assert [figure["reached"] for figure in found["figures"]] == [1.0, 1.0]
    assert [entry["clients"] for entry in found["rounds"]] == [8, options.connections]
    assert found["rss_bytes"]["theirs"] > 2**20


def test_systems_with_other_vectors_are_not_compared(
    options: ServiceOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "PYTHONS", (Path(sys.executable),) * 2)
    for server in ("_run_other", "bench_service"):
        monkeypatch.setattr(peers, server, lambda *_, **__: nullcontext())
    monkeypatch.setattr(peers, "_cosines", lambda *_: [1.0, 0.98])
    with raises(CareError, "other_vectors"):
        peers.sentence_transformers(options)


def test_a_system_that_is_not_installed_is_an_error(
    options: ServiceOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "bin/python"
    monkeypatch.setattr(peers, "PYTHONS", (python, python))
    with raises(CareError, "baseline_missing", path=python):
        peers.infinity(options)


@pytest.mark.train
def test_the_model_for_other_systems_gives_the_vectors_of_the_service(tmp_path: Path) -> None:
    import onnx
    import onnxruntime as ort
    from sentence_transformers import SentenceTransformer
    from transformers import AutoTokenizer

    pair, folder = load_pair("care-mini"), tmp_path / "model"
    peers.write_model(pair, folder)
    expected = OnnxEncoder(pair.query, pair.folder, threads=1).encode(TEXTS).vectors
    dequantised = SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    # The benchmark requires 0.99.
    assert (dequantised * expected).sum(axis=1).min() > 0.997
    tokens = AutoTokenizer.from_pretrained(folder)(TEXTS, padding=True, return_tensors="np")
    session = ort.InferenceSession(os.fspath(folder / "model.onnx"))
    inputs = {key: tokens[key] for key in ("input_ids", "attention_mask")}
    (states,) = session.run([HIDDEN_STATES], inputs)
    pooled = (states * tokens["attention_mask"][..., None]).sum(axis=1)
    pooled /= np.linalg.norm(pooled, axis=1, keepdims=True)
    np.testing.assert_allclose(pooled, expected, atol=1e-5)
    # It has no pooling to cut.
    with pytest.raises(ValueError):
        peers.without_pooling(onnx.load(folder / "model.onnx"), pair.query.native_dimension)
