import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from core.encoders import Pair
from core.errors import CareError, PairError, ProviderError
from core.files import sha256_file
from core.types import FloatArray
from models.encoders.onnx import OnnxEncoder
from models.encoders.providers import Buckets, ProviderName, ProviderOptions
from models.pairs import load_pair
from tests.encoders import make_spec
from tests.errors import raises

FILES = ("weights", "tokenizer")
TEXTS = ["头痛", "高血压患者能不能吃党参？", "孩子发烧三十九度，" * 20]


@pytest.fixture(scope="module")
def pair() -> Pair:
    return load_pair("care-mini")


@pytest.fixture(scope="module")
def query_encoder(pair: Pair) -> OnnxEncoder:
    return OnnxEncoder(pair.query, pair.folder, threads=1)


def test_onnx_runtime_has_no_telemetry(tmp_path: Path) -> None:
    """Telemetry would leave a device id and a queue of events in the home folder."""
    environment = {k: v for k, v in os.environ.items() if k != "ORT_DISABLE_TELEMETRY"}
    code = """
from models.encoders.onnx import OnnxEncoder
from models.pairs import load_pair
pair = load_pair("care-mini")
OnnxEncoder(pair.query, pair.folder, threads=1).encode(["头痛"])
"""
    environment |= {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert not list(tmp_path.rglob("*"))


def test_vectors_are_float32_of_unit_norm(query_encoder: OnnxEncoder) -> None:
    vectors = query_encoder.encode(TEXTS).vectors
    assert vectors.dtype == np.float32
    assert vectors.shape == (len(TEXTS), query_encoder.spec.dimension)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)


def test_long_texts_are_truncated_and_reported(query_encoder: OnnxEncoder) -> None:
    encoding = query_encoder.encode(["短", "很长的一段话。" * 500])
    assert encoding.truncated.tolist() == [False, True]
    assert encoding.token_counts[1] == query_encoder.spec.max_length


def test_offsets_match_the_tokens(query_encoder: OnnxEncoder) -> None:
    for text in TEXTS:
        offsets = query_encoder.token_offsets(text)
        assert len(offsets) == query_encoder.encode([text]).token_counts[0]
    assert offsets[-1] == (len(text) - 1, len(text))


def test_offsets_cover_text_beyond_the_maximum_length(query_encoder: OnnxEncoder) -> None:
    sentence = "很长的一段话。"
    offsets = query_encoder.token_offsets(sentence * 500)
    ends = [end for start, end in offsets if end > start]
    assert len(offsets) > 4 * query_encoder.spec.max_length
    assert ends == sorted(ends)
    assert ends[-1] == 500 * len(sentence)
    # The prompt, the two special tokens and the word prefix have empty spans.
    beside = len(query_encoder.token_offsets(""))
    assert beside <= len(offsets) - len(ends) <= beside + 1


def test_a_paraphrase_is_nearer_than_another_topic(query_encoder: OnnxEncoder) -> None:
    a, b, c = query_encoder.encode(["血压高吃什么药", "高血压用药", "骨折怎么固定"]).vectors
    assert a @ b > a @ c


def test_query_and_document_encoder_share_a_space(pair: Pair, query_encoder: OnnxEncoder) -> None:
    documents = OnnxEncoder(pair.document, pair.folder, threads=1)
    scores = query_encoder.encode(TEXTS).vectors @ documents.encode(TEXTS).vectors.T
    assert (scores.argmax(axis=1) == np.arange(len(TEXTS))).all()


def test_fewer_dimensions_are_a_renormalised_prefix(pair: Pair, query_encoder: OnnxEncoder) -> None:
    spec = pair.query.model_copy(update={"dimension": 64})
    short = OnnxEncoder(spec, pair.folder, threads=1).encode(TEXTS).vectors
    prefix = query_encoder.encode(TEXTS).vectors[:, :64]
    expected = prefix / np.linalg.norm(prefix, axis=1, keepdims=True)
    np.testing.assert_allclose(short, expected, atol=1e-6)


@pytest.mark.parametrize("field", ["weights", "tokenizer"])
def test_a_missing_or_changed_file_is_an_error(pair: Pair, tmp_path: Path, field: str) -> None:
    source = pair.folder / getattr(pair.query, field)
    spec = pair.query.model_copy(
        update={
            "weights": str((pair.folder / pair.query.weights).resolve()),
            "tokenizer": str((pair.folder / pair.query.tokenizer).resolve()),
        }
        | {field: source.name}
    )
    path = tmp_path / source.name
    with raises(PairError, "missing_file", path=path):
        OnnxEncoder(spec, tmp_path, threads=1)
    shutil.copy(source, tmp_path)
    with path.open("r+b") as file:
        file.seek(100)
        file.write(b"changed")
    with raises(PairError, "checksum_mismatch", path=path):
        OnnxEncoder(spec, tmp_path, threads=1)


@pytest.fixture
def padded_encoder(pair: Pair) -> OnnxEncoder:
    """Pads as for TensorRT but runs on the processor."""
    encoder = OnnxEncoder(pair.query, pair.folder, threads=1)
    encoder.buckets = Buckets.up_to(4, pair.query.max_length)
    return encoder


def record_shapes(encoder: OnnxEncoder, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    shapes: list[tuple[int, ...]] = []
    run = encoder.run

    def recorded(ids: NDArray[np.int64], mask: NDArray[np.int64]) -> FloatArray:
        shapes.append(ids.shape)
        assert mask.shape == ids.shape
        assert mask.any(axis=1).all()
        return run(ids, mask)

    monkeypatch.setattr(encoder, "run", recorded)
    return shapes


def test_padding_to_a_bucket_does_not_change_vectors(
    query_encoder: OnnxEncoder, padded_encoder: OnnxEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = record_shapes(padded_encoder, monkeypatch)
    padded, plain = padded_encoder.encode(TEXTS), query_encoder.encode(TEXTS)
    assert shapes == [(4, 256)]
    assert padded.vectors.shape == plain.vectors.shape
    np.testing.assert_allclose(padded.vectors, plain.vectors, atol=1e-5)
    np.testing.assert_array_equal(padded.token_counts, plain.token_counts)
    np.testing.assert_array_equal(padded.truncated, plain.truncated)


def test_more_rows_than_the_largest_bucket_are_split(
    query_encoder: OnnxEncoder, padded_encoder: OnnxEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"第{i}个问题" for i in range(11)]
    shapes = record_shapes(padded_encoder, monkeypatch)
    vectors = padded_encoder.encode(texts).vectors
    assert shapes == [(4, 16), (4, 16), (4, 16)]
    np.testing.assert_allclose(vectors, query_encoder.encode(texts).vectors, atol=1e-5)


def test_without_buckets_a_batch_is_padded_to_its_longest_text(
    query_encoder: OnnxEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = record_shapes(query_encoder, monkeypatch)
    counts = query_encoder.encode(TEXTS).token_counts
    assert shapes == [(len(TEXTS), counts.max())]


def test_warm_up_runs_and_logs_the_shapes(
    query_encoder: OnnxEncoder,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    shapes = record_shapes(query_encoder, monkeypatch)
    with caplog.at_level(logging.INFO, logger="models.encoders.onnx"):
        query_encoder.warm_up()
    assert shapes == [(1, 16)]
    assert [r.getMessage().split(" in ")[0] for r in caplog.records] == ["warm-up: 1 x 16 tokens"]


@pytest.mark.parametrize("name", ["cuda", "tensorrt"])
def test_a_provider_that_is_not_installed_is_an_error(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, name: ProviderName
) -> None:
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CPUExecutionProvider"])
    with raises(ProviderError, "provider_not_installed", provider=name):
        OnnxEncoder(pair.query, pair.folder, threads=1, provider=ProviderOptions(name))


def claim_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates an installed GPU build; a session still has only the processor."""
    names = ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(ort, "get_available_providers", lambda: names)


@pytest.mark.filterwarnings("ignore:Specified provider")
@pytest.mark.parametrize("name", ["cuda", "tensorrt"])
def test_a_silent_fallback_of_a_session_is_an_error(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: ProviderName
) -> None:
    claim_gpu(monkeypatch)
    options = ProviderOptions(name, cache=tmp_path)
    with raises(ProviderError, "provider_not_started", provider=name, device=0):
        OnnxEncoder(pair.query, pair.folder, threads=1, provider=options)
    folders = [pair.query.weights_sha256] if name == "tensorrt" else []
    assert [path.name for path in tmp_path.iterdir()] == folders


def test_a_failing_provider_is_not_replaced(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def fail(_: ort.InferenceSession, providers: Any, *__: Any) -> None:
        tried.append([name for name, _ in providers])
        raise RuntimeError("no driver")

    claim_gpu(monkeypatch)
    monkeypatch.setattr(ort.InferenceSession, "_create_inference_session", fail)
    with raises(ProviderError, "provider_not_started", provider="cuda"):
        OnnxEncoder(pair.query, pair.folder, threads=1, provider=ProviderOptions("cuda"))
    assert tried == [["CUDAExecutionProvider", "CPUExecutionProvider"]]


@pytest.mark.filterwarnings("ignore:Specified provider")
def test_a_graph_with_matrix_products_on_the_processor_is_an_error(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim_gpu(monkeypatch)
    monkeypatch.setattr(ort.InferenceSession, "get_providers", lambda _: ["CUDAExecutionProvider"])
    with raises(ProviderError, "unsupported_operators", provider="cuda") as caught:
        OnnxEncoder(pair.query, pair.folder, threads=1, provider=ProviderOptions("cuda"))
    assert "MatMulIntegerToFloat" in caught.value.fields["operators"]


def test_an_engine_folder_that_cannot_be_created_is_an_error(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim_gpu(monkeypatch)
    (tmp_path / "file").touch()
    options = ProviderOptions("tensorrt", cache=tmp_path / "file")
    with pytest.raises(CareError) as caught:
        OnnxEncoder(pair.query, pair.folder, threads=1, provider=options)
    assert str(tmp_path / "file") in str(caught.value)


def test_a_checkpoint_is_not_an_onnx_file(pair: Pair) -> None:
    spec = make_spec().model_copy(update={"format": "transformers"})
    with raises(PairError, "not_onnx", format="transformers"):
        OnnxEncoder(spec, pair.folder, threads=1)


@pytest.mark.parametrize("field", ["weights", "tokenizer"])
def test_a_file_that_does_not_load_is_an_error(pair: Pair, tmp_path: Path, field: str) -> None:
    places = {name: str((pair.folder / getattr(pair.query, name)).resolve()) for name in FILES}
    (tmp_path / "bad").write_bytes(b"{")
    changes = places | {field: "bad", f"{field}_sha256": sha256_file(tmp_path / "bad")}
    code = {"weights": "bad_graph", "tokenizer": "bad_tokenizer"}[field]
    with raises(PairError, code, path=tmp_path / "bad"):
        OnnxEncoder(pair.query.model_copy(update=changes), tmp_path, threads=1)
