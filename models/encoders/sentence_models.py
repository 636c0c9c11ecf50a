"""Models of sentence-transformers as pairs, from the files of a folder or of the Hub."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from core.encoders import EncoderSpec, Pair, Role
from core.errors import PairError
from core.files import sha256_file
from models.encoders.checkpoints import SMALL_FILES, download
from models.encoders.modules import read_config, read_modules, read_pooling


def sentence_model(name: str) -> Pair:
    """Returns a sentence-transformers model as a pair; the model encodes both sides.

    Pooling, Dense modules, length and prompts are those of its files. A model without such files is
    pooled by the mean, as the library does. Of a model of the Hub only the configuration is read.
    """
    local = Path(name)
    is_local = local.is_dir()
    folder = local if is_local else download(name, None, patterns=SMALL_FILES)
    pooling = read_pooling(folder)
    transformer, dense = read_modules(folder, pooling)
    config = read_config(transformer / "config.json")
    width = config.get("hidden_size")
    for part in dense:
        width = read_config(part / "config.json")["out_features"]
    if not isinstance(width, int):
        reason = "has no hidden_size: describe the model by a pair's TOML file"
        raise PairError.at(transformer / "config.json", reason, "bad_module")
    facts = {
        "model": name,
        # The snapshot of the Hub is a folder with the name of its commit.
        "revision": _checksum(folder) if is_local else folder.name,
        "format": "transformers",
        "weights": "." if is_local else "",
        "dimension": width,
        "native_dimension": width,
        "max_length": _max_length(folder, transformer, config),
        "pooling": pooling,
        "normalize": True,
        "embedding_space": name,
    }
    prompts = _read(folder / "config_sentence_transformers.json").get("prompts") or {}
    roles: tuple[Role, ...] = ("query", "document")
    query, document = (
        EncoderSpec(role=role, prompt=prompts.get(role) or "", **facts) for role in roles
    )
    return Pair(name=name, description=name, folder=folder, query=query, document=document)


def _read(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = read_config(file) if file.is_file() else {}
    return found


def _max_length(folder: Path, transformer: Path, config: Mapping[str, Any]) -> int:
    """Returns the length [tokens] that the library truncates texts to."""
    stated = [_read(place / "sentence_bert_config.json") for place in (transformer, folder)]
    limits = [found.get("max_seq_length") for found in stated]
    if not any(limits):
        limits = [_read(transformer / "tokenizer_config.json").get("model_max_length")]
    limits.append(config.get("max_position_embeddings"))
    return min((int(limit) for limit in limits if limit), default=512)


def _checksum(folder: Path) -> str:
    """Returns the checksum of the weights in a folder, which has no revision."""
    files = sorted([*folder.rglob("*.safetensors"), *folder.rglob("*.bin")])
    return hashlib.sha256("".join(map(sha256_file, files)).encode()).hexdigest()
