"""Where encoders begin: checkpoints, sides of registered pairs, and models cut from them."""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers.sentence_transformer.modules import Dense
from torch import nn
from transformers import PreTrainedTokenizerFast

from core.errors import TrainingError
from core.files import sha256_file
from core.types import EncoderSpec
from models.conversion.bert import build_bert
from models.conversion.source import MODEL, REVISION, SHA256, load_source
from models.conversion.vocabulary import EXTRA_PIECES, build_tokenizer, kept_pieces
from models.encoders.checkpoints import adapter_folder, checkpoint_folder
from models.encoders.transformers import modules
from models.pairs import load_pair
from models.training.data import read_texts
from models.training.encoder import (
    PROJECTION,
    Side,
    copy_tokenizer,
    load_backbone,
    write_projection,
)
from models.training.folders import new_folder
from models.training.recipe import EncoderStart
from models.training.vocabulary import trim, used_tokens

EMBEDDED = "embedded"


def prepare(start: EncoderStart, key_name: str, out: Path) -> Side:
    """Returns the encoder that a start describes; what must be made is made in `out`, once.

    Args:
        start: The start.
        key_name: `query` or `document`, for messages.
        out: The folder of starts.

    Raises:
        TrainingError: If the start does not load or cannot be cut as asked.
        PairError: If a named pair or checkpoint is missing, or pools in another way.
    """
    source, adapter, identity = _source(start, key_name, out)
    _, dense = modules(source, start.pooling)
    if dense not in ([], [source / PROJECTION]):
        raise TrainingError(
            f"{key_name}: {dense[0]} is a Dense module, which training would leave out"
        )
    changes = start.model_dump(include={"layers", "projection"}, exclude_none=True)
    kept = None
    if start.vocabulary is not None:
        texts = [text.text for text in read_texts(start.vocabulary, frozenset(), {})[0]]
        kept = used_tokens(source, [*texts, start.prompts.query, start.prompts.document])
        changes["vocabulary"] = kept.tolist()
    if start.projection is not None and start.lora is not None:
        raise TrainingError(f"{key_name}: projection and lora cannot be trained together")
    folder = source
    if changes:
        if adapter:
            raise TrainingError(f"{key_name}: {source} has an adapter: merge it before a cut")
        if dense:
            raise TrainingError(f"{key_name}: {source} has a projection, which a cut would lose")
        key = _digest({"source": identity, "changes": changes})
        folder = out / key[:12]
        _once(folder, lambda path: _cut(source, start, kept, path, key_name))
    # What was cut is in the folder's name.
    facts = start.model_dump(mode="json", exclude={"start", "vocabulary"})
    return Side(
        folder=folder,
        adapter=adapter,
        start=start,
        native_dimension=_native_dimension(folder, start, key_name),
        model=identity["model"],
        revision=identity["revision"],
        key=_digest({"source": identity, "changes": changes, "facts": facts}),
    )


def _source(
    start: EncoderStart, key_name: str, out: Path
) -> tuple[Path, Path | None, dict[str, str]]:
    """Returns checkpoint, adapter and identity of what a start is cut from."""
    if start.pair is not None:
        pair = load_pair(start.pair)
        spec = getattr(pair, start.side)
        if spec.format == "transformers" and spec.config:
            raise TrainingError(
                f"{key_name}: pair: {spec.model} is read with another configuration than its own: "
                "write it into the config.json of a copy and name that as start"
            )
        if spec.format == "transformers":
            adapter = adapter_folder(spec, pair.folder) if spec.adapter else None
            folder = checkpoint_folder(spec, pair.folder)
            return folder, adapter, _identity(folder, adapter, spec.model, spec.revision)
        raise TrainingError(
            f"{key_name}: pair: {spec.model} is ONNX, which cannot be trained: name a pair of "
            f"format 'transformers' or a checkpoint as start, or start: {EMBEDDED}"
        )
    if start.start == EMBEDDED:
        return _converted(out)
    named = Path(start.start or "")
    if named.is_dir():
        return named, None, _identity(named, None, named.name, "")
    hub = EncoderSpec(
        model=start.start or "",
        revision=start.revision or "main",
        format="transformers",
        role="document",
        dimension=1,
        native_dimension=1,
        max_length=start.max_length,
        pooling=start.pooling,
        normalize=True,
        prompt="",
        embedding_space="start",
    )
    folder = checkpoint_folder(hub, Path())
    return folder, None, _identity(folder, None, hub.model, hub.revision)


def _identity(folder: Path, adapter: Path | None, model: str, revision: str) -> dict[str, str]:
    """Names a checkpoint by the checksums of its files: a revision may be forgotten."""
    files = [
        path
        for root in (folder, *([adapter] if adapter else []))
        for path in sorted(root.rglob("*"))
        if path.suffix in {".json", ".safetensors", ".bin", ".txt", ".model"}
    ]
    content = _digest([[path.name, sha256_file(path)] for path in files])
    return {"model": model, "revision": revision or content[:12], "content": content}


def _converted(out: Path) -> tuple[Path, Path | None, dict[str, str]]:
    """Makes the torch form of the model that the embedded pair comes from."""
    content = _digest([SHA256, sha256_file(EXTRA_PIECES)])
    identity = {"model": MODEL, "revision": REVISION, "content": content}
    folder = out / f"{REVISION}-{content[:12]}"
    _once(folder, _convert)
    return folder, None, identity


def _convert(folder: Path) -> None:
    source = load_source()
    kept = kept_pieces(source)
    begin, padding, end = (source.pieces[id_] for id_ in source.controls)
    build_bert(source, kept).save_pretrained(folder)
    PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=build_tokenizer(source, kept),
        bos_token=begin,
        cls_token=begin,
        pad_token=padding,
        eos_token=end,
        sep_token=end,
        unk_token=source.pieces[source.unknown],
    ).save_pretrained(folder)


def _cut(
    source: Path,
    start: EncoderStart,
    kept: NDArray[np.int64] | None,
    folder: Path,
    key_name: str,
) -> None:
    model = load_backbone(source)
    if start.layers is not None:
        keep_layers(model, start.layers, key_name)
    copy_tokenizer(source, folder)
    if kept is not None:
        trim(model, source, folder, kept)
    model.save_pretrained(folder)
    if start.projection is not None:
        torch.manual_seed(0)
        width = model.config.hidden_size
        write_projection(folder, Dense(width, start.projection, activation_function=nn.Identity()))


def keep_layers(model: Any, layers: Sequence[int], key_name: str) -> None:
    """Keeps some layers of a model, in the given order; nothing else of it changes.

    This is KALE's start (arXiv 2304.01016): a query encoder pruned from a trained one.

    Raises:
        TrainingError: If the model has no such layer, or lays its layers out in another way.
    """
    holder = getattr(model, "encoder", model)
    name = next((n for n in ("layer", "layers") if hasattr(holder, n)), None)
    if name is None:
        raise TrainingError(f"{key_name}.layers: {type(model).__name__} shows no list of layers")
    have = getattr(holder, name)
    if beyond := [layer for layer in layers if layer >= len(have)]:
        raise TrainingError(
            f"{key_name}.layers: there is no layer {beyond[0]}: the model has {len(have)}"
        )
    setattr(holder, name, nn.ModuleList(have[layer] for layer in layers))
    for index, layer in enumerate(getattr(holder, name)):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = index
    model.config.num_hidden_layers = len(layers)
    if isinstance(types := getattr(model.config, "layer_types", None), list):
        model.config.layer_types = [types[layer] for layer in layers]


def _native_dimension(folder: Path, start: EncoderStart, key_name: str) -> int:
    if (dense := folder / PROJECTION / "config.json").is_file():
        native = int(json.loads(dense.read_text("utf-8"))["out_features"])
    else:
        native = int(json.loads((folder / "config.json").read_text("utf-8"))["hidden_size"])
    if start.dimension is not None and start.dimension > native:
        raise TrainingError(
            f"{key_name}.dimension: {start.dimension} is more than the {native} of the model"
        )
    return native


def _once(folder: Path, make: Callable[[Path], None]) -> None:
    if not folder.exists():
        with new_folder(folder) as temporary:
            make(temporary)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
