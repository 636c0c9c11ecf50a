"""Models of transformers that encoders are made of: loading, freezing of layers, dropout."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModel

from core.errors import CareError
from models.encoders.configuration import read_configuration
from training.errors import TrainingError


def load_backbone(
    folder: Path, dtype: str = "float32", config: Mapping[str, Any] | None = None
) -> Any:
    """Loads a transformers checkpoint without its pooler, which training does not use.

    `config` replaces entries of config.json.

    Raises:
        TrainingError: If the checkpoint does not load or lacks weights.
        PairError: If transformers does not support the model type.
    """
    try:
        model, report = AutoModel.from_pretrained(
            folder,
            config=read_configuration(folder, config or {}),
            dtype=getattr(torch, dtype),
            output_loading_info=True,
        )
    except CareError:
        raise
    except Exception as error:  # the library raises nothing narrower
        reason = f"cannot be loaded as a transformers checkpoint: {error}"
        raise TrainingError.at(folder, reason, "bad_checkpoint") from error
    missing = sorted(key for key in report["missing_keys"] if not key.startswith("pooler."))
    if missing:
        reason = f"lacks {len(missing)} weights of the model, the first is {missing[0]}"
        raise TrainingError.at(folder, reason, "missing_weights")
    if getattr(model, "pooler", None) is not None:
        model.pooler = None
    return model


def freeze(model: Any, layers: int) -> None:
    """Freezes the embeddings and the first layers of a BERT-like model.

    Raises:
        TrainingError: If the model has another layout or fewer layers.
    """
    stack = getattr(getattr(model, "encoder", None), "layer", None)
    if stack is None or not hasattr(model, "embeddings") or layers > len(stack):
        reason = f"cannot freeze {layers} layers of {type(model).__name__}: it is not a BERT-like "
        reason += f"model with at least {layers} layers"
        raise TrainingError.at("frozen_layers", reason, "no_such_layer")
    for module in (model.embeddings, *stack[:layers]):
        module.requires_grad_(False)


def set_dropout(module: nn.Module, dropout: float) -> None:
    """Replaces the dropout of all layers, also that of attention."""
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = dropout
        elif isinstance(getattr(part, "attention_dropout", None), float):
            setattr(part, "attention_dropout", dropout)  # noqa: B010 (typed as a module)
