"""Configurations of transformers checkpoints, read without the code that a checkpoint may name."""

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from core.errors import PairError
from models.encoders.lookup import MODEL_TYPE as LOOKUP  # registers the type

# Entries of config.json that name the code of a layer.
_IMPLEMENTATIONS = (
    "attn_implementation",
    "_attn_implementation",
    "experts_implementation",
    "_experts_implementation",
)
# Entries of the type `new` with the only values that the type `gte` computes.
_GTE = {
    "position_embedding_type": "rope",
    "layer_norm_type": "layer_norm",
    "logn_attention_scale": False,
    "logn_attention_clip1": False,
    "pack_qkv": True,
}


def read_configuration(checkpoint: Path, changes: Mapping[str, Any]) -> PreTrainedConfig:
    """Reads the configuration of a checkpoint; `changes` replace entries of config.json.

    A checkpoint of type `new` (Alibaba-NLP/new-impl, for example gte-multilingual-mlm-base) is
    read as type `gte`, which is the same architecture in transformers.
    """
    written, _ = PreTrainedConfig.get_config_dict(checkpoint)
    remote = written.pop("auto_map", None)
    # A copy, because the library modifies its argument.
    entries = written | deepcopy(dict(changes))
    for name in _IMPLEMENTATIONS:
        # With a slash it names a repository of compiled code on the Hugging Face Hub.
        if "/" in str(entries.get(name, "")):
            del entries[name]
    if entries.get("model_type") == "new":
        entries = _as_gte(entries, checkpoint)
    kind = entries.get("model_type", "")
    try:
        config = AutoConfig.for_model(kind)
    except ValueError as error:
        code = " (code of the checkpoint is not executed)" if remote else ""
        reason = (
            f"has the model_type '{kind}', which transformers does not support{code}: "
            "set a supported one in config of the pair's TOML file or of the recipe's encoder"
        )
        raise PairError.at(checkpoint, reason, "unknown_architecture", model_type=kind) from error
    if kind == LOOKUP and entries.pop("context", 0):
        reason = "is a lookup encoder with `context`, which there is no more: train it without"
        raise PairError.at(checkpoint, reason, "unknown_architecture", model_type=kind)
    return type(config).from_dict(entries)


def _as_gte(entries: dict[str, Any], checkpoint: Path) -> dict[str, Any]:
    """Returns the entries of a configuration of type `new` as those of type `gte`.

    NTK scaling by a factor f multiplies θ by f and divides frequencies by f^(2 / width of a head).
    """
    theta, scaling = float(entries.get("rope_theta", 10_000)), entries.get("rope_scaling")
    rope = {"rope_type": "default", "rope_theta": theta}
    values = {name: entries.get(name, value) for name, value in _GTE.items()}
    if scaling:
        factor = float(scaling["factor"])
        width = entries["hidden_size"] // entries["num_attention_heads"]
        rope = {
            "rope_type": "linear",
            "rope_theta": theta * factor,
            "factor": factor ** (2 / width),
        }
        values["rope_scaling"] = (scaling["type"], scaling.get("mixed_b"))
    wrong = [name for name, value in values.items() if value != (_GTE.get(name, ("ntk", None)))]
    if wrong:
        reason = f"is of type 'new' with {wrong[0]} {values[wrong[0]]}, which transformers' type "
        reason += "'gte' does not have: use another checkpoint"
        raise PairError.at(checkpoint, reason, "unknown_architecture", model_type="new")
    kept = entries.keys() - {"rope_theta", "rope_scaling", "architectures", *_GTE}
    return {name: entries[name] for name in kept} | {"model_type": "gte", "rope_parameters": rope}
