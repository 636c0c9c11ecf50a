import json
import shutil
import socket
import subprocess
import sys
import types
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModel

from core.encoders import Encoder, Pair, Pooling
from core.errors import CareError, PairError, ProviderError, VectorError
from core.manifest import Chunking
from core.text import document_text
from core.types import Document
from indexer.chunking import Chunker, token_starts
from models.encoders.checkpoints import checkpoint_tokenizer
from models.encoders.factory import EncoderOptions, document_encoder, token_counter
from models.encoders.tokenizer import Tokens
from models.encoders.transformers import TransformersEncoder, pool_states
from models.pairs import load_pair
from tests.checkpoints import (
    LONG,
    MAX_LENGTH,
    TEXTS,
    WIDTH,
    add_dense,
    checkpoint_spec,
    token_states,
    unit,
    write_bert,
    write_modules,
    write_qwen3,
)
from tests.errors import raises
from tests.models.encoders.embedding_server import NATIVE, FakeServer

pytestmark = pytest.mark.train


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("bert"))


def load(folder: Path, pooling: Pooling = "last_token", **changes: Any) -> TransformersEncoder:
    spec = checkpoint_spec(folder, pooling, **changes)
    return TransformersEncoder(spec, Path(), device="cpu")


def all_ids(folder: Path, text: str) -> list[int]:
    """Returns the tokens of a text by the tokenizer file of the checkpoint."""
    ids: list[int] = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    return ids


def test_last_token_pooling_uses_the_end_of_text_token(qwen3: Path) -> None:
    model = AutoModel.from_pretrained(qwen3)
    expected = [unit(token_states(model, all_ids(qwen3, text))[-1]) for text in TEXTS]
    encoding = load(qwen3).encode(TEXTS)
    assert encoding.vectors.dtype == np.float32
    np.testing.assert_allclose(encoding.vectors, torch.stack(expected), atol=1e-5)
    assert encoding.token_counts.tolist() == [len(all_ids(qwen3, text)) for text in TEXTS]
    assert not encoding.truncated.any()
    assert np.sort(encoding.vectors @ encoding.vectors.T)[:, -2].max() < 0.95


@pytest.mark.parametrize("pooling", ["cls", "mean", "last_token"])
def test_states_are_pooled_before_they_leave_the_device(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch, pooling: Pooling
) -> None:
    copied: list[tuple[int, ...]] = []
    copy = torch.Tensor.cpu

    def spy(self: torch.Tensor) -> torch.Tensor:
        copied.append(tuple(self.shape))
        return copy(self)

    encoder = load(qwen3, pooling)
    monkeypatch.setattr(torch.Tensor, "cpu", spy)
    encoder.encode(TEXTS)
    assert copied == [(len(TEXTS), WIDTH)]


def test_a_text_without_tokens_is_an_error(qwen3: Path) -> None:
    with raises(VectorError, "no_tokens"):
        load(qwen3).encode_tokens([Tokens([1, 2], truncated=False), Tokens([], truncated=False)])


@pytest.mark.parametrize("pooling", ["cls", "mean", "last_token"])
def test_pooling_equals_a_loop_over_texts(pooling: Pooling) -> None:
    states = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    lengths = [1, 3, 5]
    mask = torch.tensor([[int(i < length) for i in range(5)] for length in lengths])
    picked = {"cls": lambda own: own[0], "last_token": lambda own: own[-1]}
    pick = picked.get(pooling, lambda own: own.float().mean(dim=0))
    expected = [pick(own[:length]) for own, length in zip(states, lengths, strict=True)]
    pooled = pool_states(states, mask, pooling)
    torch.testing.assert_close(pooled.float(), torch.stack(expected).float())


def test_batches_are_bounded_by_tokens(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = load(qwen3)
    tokens = encoder.tokenize([*TEXTS, LONG, *TEXTS])
    expected = encoder.encode_tokens(tokens).vectors
    shapes: list[tuple[int, ...]] = []
    forward = encoder._model.forward

    def spy(**inputs: Any) -> Any:
        shapes.append(tuple(inputs["input_ids"].shape))
        return forward(**inputs)

    monkeypatch.setattr(encoder._model, "forward", spy)
    monkeypatch.setattr("models.encoders.transformers._BATCH_TOKENS", 60)
    vectors = encoder.encode_tokens(tokens).vectors
    np.testing.assert_allclose(vectors, expected, atol=1e-5)
    assert all(rows == 1 or rows * length <= 60 for rows, length in shapes)
    assert 1 < len(shapes) < len(tokens)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_cls_and_mean_of_an_encoder(bert: Path, pooling: Pooling) -> None:
    model = AutoModel.from_pretrained(bert)
    states = [token_states(model, all_ids(bert, text)) for text in TEXTS]
    expected = [unit(s[0] if pooling == "cls" else s.mean(dim=0)) for s in states]
    vectors = load(bert, pooling).encode(TEXTS).vectors
    np.testing.assert_allclose(vectors, torch.stack(expected), atol=1e-5)


def test_a_text_has_the_same_vector_alone_and_in_any_batch(qwen3: Path) -> None:
    encoder = load(qwen3)
    alone = np.concatenate([encoder.encode([text]).vectors for text in TEXTS])
    backwards = encoder.encode([LONG, *reversed(TEXTS)]).vectors[:0:-1]
    np.testing.assert_allclose(encoder.encode(TEXTS).vectors, alone, atol=1e-5)
    np.testing.assert_allclose(backwards, alone, atol=1e-5)


@pytest.mark.parametrize("ends_texts", [True, False])
def test_truncation_keeps_the_end_of_text_token(tmp_path: Path, ends_texts: bool) -> None:
    """The end-of-text token is appended if the tokenizer does not add it."""
    folder = write_qwen3(tmp_path, ends_texts=ends_texts)
    end = 0 if ends_texts else 1
    plain = all_ids(folder, LONG)[: MAX_LENGTH - 1]
    short, long = checkpoint_tokenizer(checkpoint_spec(folder), folder)(["短", LONG])
    assert (long.ids, long.truncated) == ([*plain, end], True)
    assert (short.ids[-1], short.truncated) == (end, False)
    assert short.ids.count(end) == 1

    encoding = load(folder).encode(["短", LONG])
    assert encoding.truncated.tolist() == [False, True]
    assert encoding.token_counts.tolist() == [len(short.ids), MAX_LENGTH]
    expected = unit(token_states(AutoModel.from_pretrained(folder), [*plain, end])[-1])
    np.testing.assert_allclose(encoding.vectors[1], expected, atol=1e-5)


def test_a_special_token_in_a_text_is_plain_text(qwen3: Path) -> None:
    (tokens,) = checkpoint_tokenizer(checkpoint_spec(qwen3), qwen3)(["<|endoftext|>"])
    assert tokens.ids.count(0) == 1
    assert len(tokens.ids) > 2


SHARED = "头痛😀龘，Aspirin 100 mg <|endoftext|>" + LONG


@pytest.mark.parametrize("write", [write_qwen3, partial(write_qwen3, ends_texts=False), write_bert])
def test_offsets_cover_texts_of_any_length(tmp_path: Path, write: Any) -> None:
    folder = write(tmp_path)
    pooling: Pooling = "mean" if write is write_bert else "last_token"
    prompt = "文档："
    spec = checkpoint_spec(folder, pooling, prompt=prompt)
    for text in (*TEXTS, SHARED, ""):
        offsets = checkpoint_tokenizer(spec, folder).token_offsets(text)
        longer = spec.model_copy(update={"max_length": 4096})
        (tokens,) = checkpoint_tokenizer(longer, folder)([text])
        assert len(offsets) == len(tokens.ids)
        spans = [(start, end) for start, end in offsets if start < end]
        beside = checkpoint_tokenizer(longer, folder)([""])[0]
        assert len(spans) == len(offsets) - len(beside.ids)
        # Each character is in a token, and tokens do not overlap.
        assert {at for span in spans for at in range(*span)} == set(range(len(text)))
        assert spans == sorted(spans)


def test_tokens_of_the_bytes_of_a_character_have_its_span(qwen3: Path) -> None:
    offsets = checkpoint_tokenizer(checkpoint_spec(qwen3), qwen3).token_offsets("龘痛")
    assert offsets.count((0, 1)) > 1
    starts = token_starts(offsets)
    assert set(starts) == {0, 1}
    assert len(starts) == len(offsets) - 1


@pytest.mark.parametrize("ends_texts", [True, False])
def test_chunks_of_a_decoder_fit_and_cover_the_text(tmp_path: Path, ends_texts: bool) -> None:
    folder = write_qwen3(tmp_path, ends_texts=ends_texts)
    encoder = load(folder, prompt="文档：")
    text = SHARED + "龘" * 40
    chunks = Chunker(encoder, Chunking(tokens=MAX_LENGTH)).split(Document("d", text, "病历"))
    assert isinstance(chunks, list)
    assert "".join(chunk.text for chunk in chunks) == text
    encoding = encoder.encode([document_text(chunk.title, chunk.text) for chunk in chunks])
    assert not encoding.truncated.any()
    # All but the last are nearly as long as the limit.
    assert encoding.token_counts[:-1].mean() > 0.8 * MAX_LENGTH


def test_the_prompt_is_prepended_to_each_text(qwen3: Path) -> None:
    prompted = load(qwen3, prompt="检索：").encode(TEXTS).vectors
    expected = load(qwen3).encode([f"检索：{text}" for text in TEXTS]).vectors
    np.testing.assert_array_equal(prompted, expected)


def test_fewer_dimensions_are_a_renormalised_prefix(qwen3: Path) -> None:
    whole = load(qwen3).encode(TEXTS).vectors[:, :16]
    expected = whole / np.linalg.norm(whole, axis=1, keepdims=True)
    np.testing.assert_allclose(load(qwen3, dimension=16).encode(TEXTS).vectors, expected, atol=1e-6)


@pytest.mark.parametrize("activation", ["linear.Identity", "activation.Tanh"])
def test_a_dense_module_follows_the_pooling(tmp_path: Path, activation: str) -> None:
    folder = write_bert(tmp_path)
    pooled = [
        token_states(AutoModel.from_pretrained(folder), all_ids(folder, text)).mean(dim=0)
        for text in TEXTS
    ]
    with torch.inference_mode():
        expected = add_dense(folder, 96, activation)(torch.stack(pooled))
    if activation == "activation.Tanh":
        expected = torch.tanh(expected)
    encoder = load(folder, "mean", native_dimension=96, dimension=32)
    vectors = encoder.encode(TEXTS).vectors
    np.testing.assert_allclose(vectors, torch.stack([unit(v, 32) for v in expected]), atol=1e-5)
    assert encoder.encode(TEXTS).vectors.shape == (len(TEXTS), 32)


def test_a_transformer_may_be_in_a_subfolder(tmp_path: Path, bert: Path) -> None:
    shutil.copytree(bert, tmp_path / "0_Transformer")
    write_modules(tmp_path, ("Transformer", "0_Transformer"), ("Normalize", "2_Normalize"))
    expected = load(bert, "mean").encode(TEXTS).vectors
    np.testing.assert_array_equal(load(tmp_path, "mean").encode(TEXTS).vectors, expected)


def test_paths_of_weights_are_relative_to_the_pair(qwen3: Path) -> None:
    spec = checkpoint_spec(qwen3, weights=qwen3.name)
    encoder = TransformersEncoder(spec, qwen3.parent, device="cpu")
    np.testing.assert_array_equal(encoder.encode(TEXTS).vectors, load(qwen3).encode(TEXTS).vectors)


def drop_a_layer(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    state.pop(next(name for name in state if "layers.1.mlp" in name))
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def cut_the_weights(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(1000)


def lose_the_end_of_text(folder: Path) -> None:
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text("utf-8")) | {"post_processor": None}
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text("utf-8"))
    del config["eos_token"]
    path.write_text(json.dumps(config | {"tokenizer_class": "TokenizersBackend"}), encoding="utf-8")


@pytest.mark.parametrize(
    ("damage", "changes", "code"),
    [
        (shutil.rmtree, {}, "no_checkpoint"),
        (drop_a_layer, {}, "missing_weights"),
        (cut_the_weights, {}, "bad_checkpoint"),
        (lambda f: (f / "tokenizer.json").write_text("{"), {}, "bad_tokenizer"),
        (lose_the_end_of_text, {}, "no_end_token"),
        (lambda f: write_modules(f, ("Transformer", ""), ("CNN", "1")), {}, "unsupported_module"),
        (lambda f: write_modules(f, ("Transformer", ""), ("Dense", "2")), {}, "bad_module"),
        (lambda _: None, {"max_length": 4096}, "max_length_too_large"),
        (lambda _: None, {"native_dimension": 2560}, "other_dimension"),
    ],
)
def test_a_checkpoint_that_does_not_match_the_spec_is_an_error(
    qwen3: Path, tmp_path: Path, damage: Any, changes: dict[str, Any], code: str
) -> None:
    folder = shutil.copytree(qwen3, tmp_path / "qwen3")
    damage(folder)
    with raises(PairError, code):
        load(folder, **changes).encode(TEXTS)


@pytest.mark.parametrize(
    ("field", "away", "model"),
    [
        ("weights", {"weights": "", "model": "tiny/away"}, "tiny/away"),
        ("adapter", {"adapter": "tiny/qwen3-lora"}, "tiny/qwen3-lora"),
    ],
)
def test_a_failed_download_is_an_error(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch, field: str, away: dict[str, str], model: str
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with raises(PairError, "download_failed", model=model, field=field) as caught:
        load(qwen3, **away)
    assert "\n" not in str(caught.value)


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """What is downloaded from ModelScope: name and options; the folder is that of the name."""
    found: list[tuple[str, dict[str, Any]]] = []

    def download(name: str, **options: Any) -> str:
        found.append((name, options))
        if name == "tiny/none":
            raise RuntimeError("not found")
        return str(folders[name])

    folders: dict[str, Path] = {}
    module = types.ModuleType("modelscope")
    module.snapshot_download = download  # type: ignore[attr-defined]
    module.folders = folders  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "modelscope", module)
    monkeypatch.setenv("CARE_HUB", "modelscope")
    return found


def test_checkpoints_are_downloaded_from_modelscope(
    qwen3: Path, downloads: list[tuple[str, dict[str, Any]]], caplog: pytest.LogCaptureFixture
) -> None:
    sys.modules["modelscope"].folders["tiny/model"] = qwen3
    here, there = load(qwen3), load(qwen3, weights="", model="tiny/model")
    assert np.array_equal(here.encode(TEXTS).vectors, there.encode(TEXTS).vectors)
    assert {name for name, _ in downloads} == {"tiny/model"}
    assert "revision" not in downloads[0][1]
    assert "revision" in caplog.text


@pytest.mark.parametrize("name", ["tiny/none", "https://example.org/model", "../model", "a/b/c"])
def test_a_failed_download_from_modelscope_is_an_error(
    qwen3: Path, downloads: list[tuple[str, dict[str, Any]]], name: str
) -> None:
    with raises(PairError, "download_failed", model=name, field="weights"):
        load(qwen3, weights="", model=name)
    assert [asked for asked, _ in downloads] == ["tiny/none"] * (name == "tiny/none")


def test_another_hub_is_an_error(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARE_HUB", "other")
    with raises(CareError, "invalid_setting", name="CARE_HUB"):
        load(qwen3, weights="", model="tiny/model")


@pytest.mark.parametrize(
    "named",
    [
        {"weights": "", "model": "{url}/model"},
        {"weights": "", "model": "//{host}/model"},
        {"weights": "", "model": "{host}/model", "revision": "../../{url}"},
        {"adapter": "{url}/adapter"},
    ],
)
def test_a_pair_cannot_name_an_address(
    qwen3: Path, server: FakeServer, monkeypatch: pytest.MonkeyPatch, named: dict[str, str]
) -> None:
    connections: list[object] = []

    def connect(self: socket.socket, address: object) -> None:
        connections.append(address)
        raise OSError

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    host = f"127.0.0.1:{server.server_port}"
    fields = {name: value.format(url=server.url, host=host) for name, value in named.items()}
    with raises(PairError, "download_failed"):
        load(qwen3, **fields)
    assert host not in map(str, connections)
    assert server.requests == server.paths == []


@pytest.mark.parametrize("value", ["other/kernel", "kernels-community/flash-attn3@main"])
@pytest.mark.parametrize("name", ["attn_implementation", "_attn_implementation"])
def test_code_that_a_checkpoint_names_is_not_loaded(
    qwen3: Path, tmp_path: Path, name: str, value: str
) -> None:
    folder = shutil.copytree(qwen3, tmp_path / "named")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {name: value}), "utf-8")
    expected = load(qwen3).encode(TEXTS).vectors
    np.testing.assert_array_equal(load(folder).encode(TEXTS).vectors, expected)


def test_a_batch_that_exceeds_gpu_memory_is_an_error(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = load(qwen3)

    def fail(**_: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(encoder._model, "forward", fail)
    with raises(ProviderError, "out_of_memory", texts=len(TEXTS)) as caught:
        encoder.encode(TEXTS)
    assert caught.value.__context__ is None


def checkpoint_pair(folder: Path, **changes: Any) -> Pair:
    query = load_pair("care-mini").query
    document = checkpoint_spec(folder, **changes)
    return Pair(name="tiny", description="d", folder=Path(), query=query, document=document)


def test_tokens_are_counted_as_they_are_encoded(qwen3: Path) -> None:
    pair = checkpoint_pair(qwen3, prompt="文档：")
    encoding = document_encoder(pair, EncoderOptions()).encode([*TEXTS, LONG])
    counted = token_counter(pair, 1)([*TEXTS, LONG])
    assert counted == [*zip(encoding.token_counts, encoding.truncated, strict=True)]
    assert counted[-1] == (MAX_LENGTH, True)


@pytest.fixture
def delivered(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The patterns of the files that are downloaded of a checkpoint."""
    patterns: list[Any] = []

    def download(model: str, *, allow_patterns: Any, **_: Any) -> str:
        patterns.append(allow_patterns)
        return str(qwen3)

    monkeypatch.setattr("models.encoders.checkpoints.snapshot_download", download)
    return patterns


def test_tokens_are_counted_without_the_weights(qwen3: Path, delivered: list[Any]) -> None:
    token_counter(checkpoint_pair(qwen3, weights=""), 1)
    assert delivered == [["*.json", "*.txt", "*.model", "*.jinja"]]


@pytest.mark.parametrize("name", ["auto", "transformers"])
def test_the_indexer_uses_transformers_for_a_checkpoint(qwen3: Path, name: str) -> None:
    encoder: Encoder = document_encoder(checkpoint_pair(qwen3), EncoderOptions(name))
    assert isinstance(encoder, TransformersEncoder)
    assert encoder.encode(TEXTS).vectors.shape == (len(TEXTS), WIDTH)


def test_documents_for_a_server_are_split_by_the_tokenizer_of_the_checkpoint(
    qwen3: Path, server: FakeServer, delivered: list[Any]
) -> None:
    """Weights are not downloaded; the tokenizer is downloaded if texts are split."""
    pair = checkpoint_pair(qwen3, weights="", native_dimension=NATIVE, dimension=16)
    encoder = document_encoder(pair, EncoderOptions("openai", base_url=server.url))
    assert encoder.encode(TEXTS).vectors.shape == (len(TEXTS), 16)
    assert delivered == []
    document, chunking = Document("d", LONG), Chunking(tokens=MAX_LENGTH)
    expected = Chunker(load(qwen3), chunking).split(document)
    assert Chunker(encoder, chunking).split(document) == expected
    assert delivered == [["*.json", "*.txt", "*.model", "*.jinja"]]


def test_an_adapter_requires_peft(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with raises(ProviderError, "missing_package", package="peft"):
        load(qwen3, adapter=str(qwen3))


def test_vllm_is_named_if_it_is_not_installed(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with raises(ProviderError, "missing_package", package="vllm"):
        document_encoder(checkpoint_pair(qwen3), EncoderOptions("vllm"))


def test_the_indexer_needs_no_torch_for_onnx_files() -> None:
    script = """
import sys
import care.indexing
from models.encoders.factory import EncoderOptions, document_encoder
from models.pairs import load_pair
document_encoder(load_pair("care-mini"), EncoderOptions())
print([name for name in ("torch", "transformers", "vllm") if name in sys.modules])
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
