"""Tiny checkpoints with random weights, in the layout of real models."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import (
    AutoModel,
    BertConfig,
    BertModel,
    GteConfig,
    GteModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
    XLMRobertaModel,
    XLMRobertaTokenizer,
)

from core.encoders import EncoderSpec, Pair, Pooling

WIDTH = 64
MAX_LENGTH = 48
TEXTS = (
    "头痛",
    "高血压患者能不能吃党参？",
    "高血压患者每天应当测量血压，按时服药，少盐饮食。",
    "孩子发烧三十九度，先物理降温，再看医生。",
    "骨折以后怎么固定",
    "Aspirin 100 mg，每日一次",
)
# The configuration of each model. Large weights give different texts clearly different vectors.
_SHAPE: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "initializer_range": 0.5,
}
_DECODER = _SHAPE | {
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "eos_token_id": 0,
}
# As in tokenizer.json of Qwen3; transformers always sets it.
_QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LONG = "糖尿病患者应当定期检查血糖，" * 20


def checkpoint_spec(folder: Path, pooling: Pooling = "last_token", **changes: Any) -> EncoderSpec:
    """Returns the spec of a tiny checkpoint in `folder`."""
    facts = {
        "model": f"tiny/{folder.name}",
        "revision": "1",
        "format": "transformers",
        "weights": str(folder),
        "role": "document",
        "dimension": WIDTH,
        "native_dimension": WIDTH,
        "max_length": MAX_LENGTH,
        "pooling": pooling,
        "normalize": True,
        "prompt": "",
        "embedding_space": "tiny-1",
    }
    return EncoderSpec.model_validate(facts | changes)


def _write_qwen_tokenizer(
    folder: Path, *, ends_texts: bool, texts: Sequence[str] = TEXTS, size: int = 400
) -> int:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<|endoftext|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    byte_level = processors.ByteLevel(trim_offsets=False)
    end = processors.TemplateProcessing(
        single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)]
    )
    tokenizer.post_processor = processors.Sequence(
        [byte_level, end] if ends_texts else [byte_level]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    ).save_pretrained(folder)
    # The tokenizer class of Qwen3-Embedding.
    edit_json(folder / "tokenizer_config.json", tokenizer_class="Qwen2Tokenizer")
    return tokenizer.get_vocab_size()


def write_qwen3(
    folder: Path,
    *,
    ends_texts: bool = True,
    texts: Sequence[str] = TEXTS,
    tokens: int = 400,
    **shape: Any,
) -> Path:
    """Writes a decoder like Qwen3-Embedding, whose tokenizer appends <|endoftext|> to each text.

    Args:
        folder: Folder to write.
        ends_texts: False for a tokenizer like that of the Qwen3 chat models, which appends nothing.
        texts: Texts that the tokenizer is trained on.
        tokens: Size of its vocabulary.
        shape: Entries of the configuration.
    """
    vocabulary = _write_qwen_tokenizer(folder, ends_texts=ends_texts, texts=texts, size=tokens)
    torch.manual_seed(0)
    default = {"vocab_size": vocabulary, "head_dim": 32, "tie_word_embeddings": True}
    config = Qwen3Config(**(_DECODER | default | shape))
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def write_gte_qwen2(folder: Path) -> Path:
    """Writes a decoder like gte-Qwen2, whose configuration names remote code.

    transformers implements the architecture.
    """
    vocabulary = _write_qwen_tokenizer(folder, ends_texts=True)
    torch.manual_seed(0)
    shape = Qwen2Config(vocab_size=vocabulary, tie_word_embeddings=False, **_DECODER)
    Qwen2ForCausalLM(shape).save_pretrained(folder)
    edit_json(folder / "config.json", auto_map={"AutoModel": "modeling_qwen.Qwen2Model"})
    code = "tokenization_qwen.Qwen2Tokenizer"
    edit_json(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": [code, f"{code}Fast"]})
    for name in ("modeling_qwen", "tokenization_qwen"):
        (folder / f"{name}.py").write_text("raise AssertionError('remote code was run')\n")
    return folder


def _write_xlmr_tokenizer(folder: Path, texts: Sequence[str] = (*TEXTS, LONG)) -> int:
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    characters = sorted(set("".join(texts)) - {" "})
    pieces = [*special, "▁", *characters, "高血压", "患者", "<mask>"]
    vocabulary = [(piece, 0.0 if piece in special else -float(i)) for i, piece in enumerate(pieces)]
    XLMRobertaTokenizer(vocab=vocabulary).save_pretrained(folder)
    return len(vocabulary)


def write_xlmr(folder: Path) -> Path:
    """Writes an encoder like bge-m3."""
    XLMRobertaModel(_xlmr_shape(folder)).save_pretrained(folder)
    return folder


def write_reranker(folder: Path, texts: Sequence[str], length: int) -> Path:
    """Writes a cross-encoder like bge-reranker-v2-m3, for pairs of at most `length` tokens.

    Its tokenizer has the characters of `texts`.
    """
    # The first position is that after the padding token.
    shape = _xlmr_shape(folder, texts, max_position_embeddings=length + 2, num_labels=1)
    model = XLMRobertaForSequenceClassification(shape)
    # The sigmoids of larger scores are all near 1.
    model.classifier.out_proj.weight.data *= 0.1
    model.save_pretrained(folder)
    return folder


def _xlmr_shape(
    folder: Path, texts: Sequence[str] = (*TEXTS, LONG), **shape: Any
) -> XLMRobertaConfig:
    torch.manual_seed(0)
    default = {"max_position_embeddings": 66, "pad_token_id": 1, "type_vocab_size": 1}
    vocabulary = _write_xlmr_tokenizer(folder, texts)
    return XLMRobertaConfig(vocab_size=vocabulary, **(_SHAPE | default | shape))


# The configuration of gte-multilingual-base in the registry, for the width of these heads.
NTK = {"theta": 20000.0, "factor": 8.0}
GTE_CONFIG = {
    "model_type": "gte",
    "rope_theta": NTK["theta"] * NTK["factor"],
    "rope_scaling": {"rope_type": "linear", "factor": NTK["factor"] ** (2 / (WIDTH // 2))},
}


def write_gte(folder: Path) -> Path:
    """Writes an encoder like gte-multilingual-base: type "new", remote code and NTK scaling."""
    model = GteModel(_gte_shape(folder))
    heads = {"classifier.weight": torch.ones(1, WIDTH), "classifier.bias": torch.ones(1)}
    scaling = {"factor": NTK["factor"], "type": "ntk"}
    return _write_new(folder, model, heads, rope_theta=NTK["theta"], rope_scaling=scaling)


def write_gte_mlm(folder: Path, *, texts: Sequence[str] = (*TEXTS, LONG), **shape: Any) -> Path:
    """Writes an encoder like gte-multilingual-mlm-base: type "new" with a head for tokens.

    Its tokenizer has the characters of `texts`; `shape` are entries of the configuration.
    """
    config = _gte_shape(folder, texts, **shape)
    width = config.hidden_size
    heads = {
        "lm_head.dense.weight": torch.ones(width, width),
        "lm_head.dense.bias": torch.ones(width),
        "lm_head.norm.weight": torch.ones(width),
        "lm_head.norm.bias": torch.ones(width),
        "lm_head.decoder.bias": torch.ones(config.vocab_size),
    }
    return _write_new(
        folder,
        GteModel(config),
        heads,
        architectures=["NewForMaskedLM"],
        rope_theta=160000,
        rope_scaling=None,
    )


def _gte_shape(folder: Path, texts: Sequence[str] = (*TEXTS, LONG), **shape: Any) -> GteConfig:
    torch.manual_seed(0)
    default = {"vocab_size": _write_xlmr_tokenizer(folder, texts), "max_position_embeddings": 64}
    return GteConfig(**(_SHAPE | default | shape))


def _write_new(
    folder: Path, model: GteModel, heads: dict[str, torch.Tensor], **entries: Any
) -> Path:
    """Writes a checkpoint of type "new", as Alibaba-NLP publishes it, with its remote code."""
    model.save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    assert "encoder.layer.0.attention.qkv_proj.weight" in state
    state = {f"new.{name}": value for name, value in state.items()} | heads
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    written = json.loads((folder / "config.json").read_text("utf-8"))
    del written["rope_parameters"]
    written |= {
        "architectures": ["NewModel"],
        "auto_map": {"AutoConfig": "configuration.NewConfig", "AutoModel": "modeling.NewModel"},
        "layer_norm_type": "layer_norm",
        "logn_attention_clip1": False,
        "logn_attention_scale": False,
        "model_type": "new",
        "pack_qkv": True,
        "position_embedding_type": "rope",
        "unpad_inputs": False,
        "use_memory_efficient_attention": False,
    }
    (folder / "config.json").write_text(json.dumps(written | entries), encoding="utf-8")
    for name in ("configuration", "modeling"):
        (folder / f"{name}.py").write_text("raise AssertionError('remote code was run')\n")
    return folder


def write_adapter(checkpoint: Path, folder: Path, kind: Any, task: str | None) -> Any:
    """Writes a LoRA adapter of random weights, and returns the adapted model, a `PeftModel`."""
    # An environment of vLLM for users lacks it.
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    config = LoraConfig(
        r=4, target_modules=["q_proj", "down_proj"], task_type=task, init_lora_weights=False
    )
    model = get_peft_model(kind.from_pretrained(checkpoint), config).eval()
    model.save_pretrained(folder)
    return model


def edit_json(path: Path, **entries: Any) -> None:
    """Sets entries of a JSON file."""
    data = json.loads(path.read_text("utf-8")) | entries
    path.write_text(json.dumps(data), encoding="utf-8")


def write_bert(folder: Path) -> Path:
    """Writes an encoder like BERT: each character is a token, between [CLS] and [SEP]."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    characters = sorted(set("".join([*TEXTS, LONG]).lower()) - {" "})
    vocabulary = {piece: i for i, piece in enumerate(special + characters)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    shape = BertConfig(vocab_size=len(vocabulary), max_position_embeddings=64, **_SHAPE)
    BertModel(shape).save_pretrained(folder)
    return folder


def add_dense(folder: Path, width: int, activation: str = "linear.Identity") -> torch.nn.Linear:
    """Adds a Dense module of sentence-transformers after a checkpoint's pooling."""
    torch.manual_seed(1)
    dense = torch.nn.Linear(WIDTH, width)
    (folder / "2_Dense").mkdir()
    config = {
        "in_features": WIDTH,
        "out_features": width,
        "bias": True,
        "activation_function": f"torch.nn.modules.{activation}",
    }
    (folder / "2_Dense" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    state = {f"linear.{name}": value for name, value in dense.state_dict().items()}
    save_file(state, folder / "2_Dense" / "model.safetensors")
    write_modules(folder, ("Transformer", ""), ("Pooling", "1_Pooling"), ("Dense", "2_Dense"))
    (folder / "1_Pooling").mkdir()
    modes = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
    config = {"word_embedding_dimension": WIDTH, **modes, "include_prompt": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return dense


def write_modules(folder: Path, *modules: tuple[str, str]) -> None:
    """Writes modules.json of sentence-transformers from (kind, folder) of each module."""
    rows = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(rows), encoding="utf-8")


def token_states(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """Returns the token vectors of a single text, float32 [tokens, width]."""
    with torch.inference_mode():
        states: torch.Tensor = model(input_ids=torch.tensor([ids])).last_hidden_state[0]
    return states


def unit(vector: torch.Tensor, dimension: int | None = None) -> torch.Tensor:
    """Truncates a vector and scales it to unit norm."""
    return torch.nn.functional.normalize(vector[:dimension], dim=0)


def _write_conan(folder: Path) -> Path:
    add_dense(write_bert(folder), 96)
    return folder


def _write_lora(folder: Path) -> Path:
    write_adapter(write_qwen3(folder), folder / "lora", AutoModel, "FEATURE_EXTRACTION")
    return folder


@dataclass(frozen=True)
class Architecture:
    write: Callable[[Path], Path]
    pooling: Pooling
    changes: dict[str, Any]


ARCHITECTURES = {
    "bert": Architecture(write_bert, "cls", {}),
    "bert-dense": Architecture(_write_conan, "mean", {"native_dimension": 96, "dimension": 80}),
    "xlm-roberta": Architecture(write_xlmr, "cls", {}),
    "gte": Architecture(write_gte, "cls", {"config": GTE_CONFIG}),
    "gte-mlm": Architecture(write_gte_mlm, "cls", {}),
    "qwen2": Architecture(write_gte_qwen2, "last_token", {"config": {"is_causal": False}}),
    "qwen3": Architecture(write_qwen3, "last_token", {"dimension": 48}),
    "qwen3-chat": Architecture(lambda f: write_qwen3(f, ends_texts=False), "last_token", {}),
    "qwen3-lora": Architecture(_write_lora, "last_token", {"adapter": "lora"}),
}


def make_pair(folder: Path, name: str) -> Pair:
    """Returns a symmetric pair of a checkpoint in `folder`, based on a model's registry entry."""
    kind = ARCHITECTURES[name]
    checkpoint = kind.write(folder / "checkpoint")
    changes = {"weights": "checkpoint", **kind.changes}
    if "adapter" in changes:
        changes["adapter"] = "checkpoint/lora"
    query, document = (
        checkpoint_spec(checkpoint, kind.pooling, **changes, role=role)
        for role in ("query", "document")
    )
    return Pair(name=name, description="tiny", folder=folder, query=query, document=document)
