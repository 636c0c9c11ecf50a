"""Vocabulary pruning: keeps only the tokens that given texts use, and their embeddings."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import AutoTokenizer

from training.errors import TrainingError

_FILE = "tokenizer.json"
_KINDS = ("Unigram", "WordPiece")


def used_tokens(folder: Path, texts: Iterable[str]) -> NDArray[np.int64]:
    """Returns the ids to keep, int64 [n], ascending.

    They are the tokens of the texts, all special tokens, and all tokens of one character, so
    that other texts can still be tokenized.
    """
    data = _read(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False).backend_tokenizer
    tokenizer.no_truncation()
    special = {token["id"] for token in data["added_tokens"]}
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    single = {
        i for piece, i in vocabulary.items() if len(piece.lstrip("▁").removeprefix("##")) <= 1
    }
    unknown = tokenizer.model.unk_token if data["model"]["type"] == "WordPiece" else None
    kept = special | single | ({vocabulary[unknown]} if unknown else {data["model"]["unk_id"]})
    for encoding in tokenizer.encode_batch(list(texts)):
        kept.update(encoding.ids)
    return np.array(sorted(kept), dtype=np.int64)


def trim(model: Any, source: Path, folder: Path, kept: NDArray[np.int64]) -> None:
    """Prunes the vocabulary of a model and of its tokenizer.

    Args:
        model: The transformers model; changed in place.
        source: Checkpoint folder with the original tokenizer.
        folder: Folder with a copy of the tokenizer's files; changed in place.
        kept: int64 [n], ids of the tokens to keep, ascending.
    """
    new_id = {old: new for new, old in enumerate(kept.tolist())}
    data = _read(source)
    vocabulary = data["model"]["vocab"]
    if data["model"]["type"] == "Unigram":
        data["model"]["vocab"] = [vocabulary[old] for old in new_id if old < len(vocabulary)]
        data["model"]["unk_id"] = new_id[data["model"]["unk_id"]]
    else:
        data["model"]["vocab"] = {p: new_id[old] for p, old in vocabulary.items() if old in new_id}
    for token in data["added_tokens"]:
        token["id"] = new_id[token["id"]]
    _renumber(data["post_processor"], new_id)
    (folder / _FILE).write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")
    # tokenizer.json lists the added tokens with their new ids; the entry here has the old ids.
    path = folder / "tokenizer_config.json"
    if path.is_file():
        config = json.loads(path.read_text(encoding="utf-8"))
        config.pop("added_tokens_decoder", None)
        path.write_text(json.dumps(config, ensure_ascii=False), encoding="utf-8")
    embeddings = model.get_input_embeddings()
    padding = new_id.get(model.config.pad_token_id)
    smaller = nn.Embedding(len(kept), embeddings.weight.shape[1], padding)
    with torch.no_grad():
        smaller.weight.copy_(embeddings.weight[torch.from_numpy(kept)])
    model.set_input_embeddings(smaller)
    model.config.vocab_size = len(kept)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if isinstance(old := getattr(model.config, name, None), int):
            setattr(model.config, name, new_id.get(old))


def _read(folder: Path) -> dict[str, Any]:
    try:
        data: dict[str, Any] = json.loads((folder / _FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TrainingError.at(folder / _FILE, "missing or not JSON", "no_tokenizer") from error
    if (kind := data["model"]["type"]) not in _KINDS:
        reason = f"a vocabulary of type {kind} cannot be pruned, only {' and '.join(_KINDS)}"
        raise TrainingError.at(folder / _FILE, reason, "unsupported_tokenizer", type=kind)
    return data


def _renumber(processor: Any, new_id: dict[int, int]) -> None:
    """Renumbers the special tokens of a post-processor."""
    if not isinstance(processor, dict):
        return
    for part in processor.get("processors", []):
        _renumber(part, new_id)
    special = processor.get("special_tokens")
    for token in special.values() if isinstance(special, dict) else []:
        token["ids"] = [new_id[old] for old in token["ids"]]
    for name in ("sep", "cls"):
        if isinstance(processor.get(name), list):
            processor[name][1] = new_id[processor[name][1]]
