import sys
from pathlib import Path

import pytest

import core.machine
from core.encoders import EncoderSpec, Pair
from core.errors import CareError, PairError, ProviderError
from models.encoders import factory
from models.encoders.factory import (
    EncoderOptions,
    document_encoder,
    load_encoder,
    query_encoder,
    resolve_backend,
    resolve_dtype,
    token_counter,
)
from models.encoders.onnx import OnnxEncoder
from models.pairs import load_pair
from tests.errors import raises


@pytest.fixture
def pair() -> Pair:
    return load_pair("care-mini")


def checkpoint_pair(pair: Pair, **changes: object) -> Pair:
    """A pair with a checkpoint as document encoder, whose files are not read."""
    files = ("weights_sha256", "tokenizer", "tokenizer_sha256")
    facts = pair.document.model_dump(exclude=set(files))
    document = EncoderSpec.model_validate(facts | {"format": "transformers"} | changes)
    return pair.model_copy(update={"document": document})


def test_onnx_files_run_in_onnx_runtime_for_queries_and_documents(pair: Pair) -> None:
    for encoder in (
        document_encoder(pair, EncoderOptions()),
        query_encoder(pair, EncoderOptions("onnx", threads=1)),
        load_encoder(pair.document, pair.folder),
    ):
        assert isinstance(encoder, OnnxEncoder)


def test_the_default_backend_depends_on_the_spec(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = checkpoint_pair(pair).document
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert resolve_backend(pair.document, "auto") == "onnx"
    assert resolve_backend(checkpoint, "auto") == "transformers"
    assert resolve_backend(checkpoint, "vllm") == "vllm"
    monkeypatch.setitem(sys.modules, "vllm", factory)
    assert resolve_backend(checkpoint, "auto") == "vllm"
    # vLLM supports neither adapters nor another model_type.
    for changes in ({"adapter": "lora"}, {"config": {"model_type": "gte"}}):
        other = checkpoint_pair(pair, **changes).document
        assert resolve_backend(other, "auto") == "transformers"


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        ({"avx2"}, "float32"),
        # OpenVINO without VNNI computes int8 products slowly or wrongly.
        ({"avx512f", "avx512_bf16", "avx_vnni"}, "float32"),
        ({"avx512_vnni"}, "int8"),
        ({"avx512_vnni", "avx512_bf16"}, "int8"),
        ({"avx512_vnni", "avx512_bf16", "amx_bf16"}, "bfloat16"),
        (set(), "float32"),
    ],
)
def test_the_dtype_of_openvino_depends_on_the_processor(
    monkeypatch: pytest.MonkeyPatch, flags: set[str], dtype: str
) -> None:
    monkeypatch.setattr(factory, "cpu_flags", lambda: flags)
    assert resolve_dtype("openvino", "auto") == dtype
    assert resolve_dtype("openvino", "float32") == "float32"
    assert resolve_dtype("openvino", dtype) == dtype
    assert resolve_dtype("transformers", "auto") == "auto"


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_dtype_without_instructions_is_an_error(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    monkeypatch.setattr(factory, "cpu_flags", lambda: {"avx2"})
    with raises(ProviderError, "unsupported_dtype", dtype=dtype):
        resolve_dtype("openvino", dtype)


@pytest.mark.parametrize(("backend", "dtype"), [("openvino", "float16"), ("vllm", "int8")])
def test_a_dtype_of_other_backends_is_an_error(backend: str, dtype: str) -> None:
    with raises(CareError, "option_not_taken", option="--dtype"):
        resolve_dtype(backend, dtype)


def test_a_missing_openvino_is_named_with_its_install_command(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "models.encoders.openvino", raising=False)
    monkeypatch.setitem(sys.modules, "openvino_telemetry", None)
    monkeypatch.setitem(sys.modules, "openvino", None)
    with raises(ProviderError, "missing_package", package="openvino") as caught:
        document_encoder(pair, EncoderOptions("openvino"))
    assert "care-retrieval[openvino]" in str(caught.value)


def test_a_backend_that_does_not_support_the_format_is_an_error(pair: Pair) -> None:
    with raises(PairError, "backend_mismatch", backend="onnx", format="transformers"):
        document_encoder(checkpoint_pair(pair), EncoderOptions("onnx"))
    with raises(PairError, "backend_mismatch", backend="openvino", format="transformers"):
        document_encoder(checkpoint_pair(pair), EncoderOptions("openvino"))
    with raises(PairError, "backend_mismatch", backend="vllm", format="onnx"):
        document_encoder(pair, EncoderOptions("vllm"))


def test_the_number_of_threads_follows_the_quota_of_the_container(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[int] = []

    def load(spec: EncoderSpec, folder: Path, threads: int) -> OnnxEncoder:
        used.append(threads)
        return OnnxEncoder(spec, folder, threads)

    monkeypatch.setattr(factory, "OnnxEncoder", load)
    monkeypatch.setattr(core.machine.os, "sched_getaffinity", lambda _: range(64))
    quota = tmp_path / "cpu.max"
    quota.write_text("200000 100000\n")
    monkeypatch.setattr(factory, "available_cpus", lambda: core.machine.available_cpus(quota))
    load_encoder(pair.query, pair.folder)
    query_encoder(pair, EncoderOptions())
    token_counter(pair)
    load_encoder(pair.query, pair.folder, 3)
    assert used == [2, 2, 2, 3]


def test_a_server_requires_an_address(pair: Pair) -> None:
    with raises(CareError, "missing_base_url"):
        document_encoder(pair, EncoderOptions("openai"))


@pytest.mark.parametrize(
    ("backend", "module", "package", "hint"),
    [
        ("openai", "openai", "httpx2", "care-retrieval[openai]"),
        ("transformers", "transformers", "torch", "make train"),
        ("transformers", "transformers", "torch", "care-retrieval[train]"),
        ("vllm", "vllm", "huggingface_hub", "pip install vllm"),
    ],
)
def test_a_missing_package_is_named_with_its_install_command(
    pair: Pair,
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    module: str,
    package: str,
    hint: str,
) -> None:
    for name in (module, "checkpoints"):
        monkeypatch.delitem(sys.modules, f"models.encoders.{name}", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    options = EncoderOptions(backend, base_url="http://h")
    with raises(ProviderError, "missing_package", package=package) as caught:
        document_encoder(checkpoint_pair(pair), options)
    assert hint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_tokens_are_counted_as_they_are_encoded(pair: Pair) -> None:
    document = pair.document.model_copy(update={"max_length": 48})
    pair = pair.model_copy(update={"document": document})
    texts = ["头痛", "高血压患者能不能吃党参？", "很长的一段话。" * 50]
    encoding = document_encoder(pair, EncoderOptions(threads=1)).encode(texts)
    counted = token_counter(pair, 1)(texts)
    assert counted == [*zip(encoding.token_counts, encoding.truncated, strict=True)]
    assert counted[-1] == (48, True)
