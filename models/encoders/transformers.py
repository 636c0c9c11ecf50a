"""Encoders in PyTorch from checkpoints of transformers, on a processor or a GPU."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModel, AutoModelForCausalLM

from core.encoders import EncoderSpec, Encoding, Pooling
from core.errors import CareError, PairError, ProviderError, VectorError
from core.types import FloatArray
from models.encoders.checkpoints import (
    adapter_folder,
    checkpoint_folder,
    checkpoint_tokenizer,
    native_encoding,
)
from models.encoders.configuration import read_configuration
from models.encoders.modules import read_config, read_modules
from models.encoders.tokenizer import TokenEncoder, Tokens, pad

# Most tokens of a batch, padding included.
_BATCH_TOKENS = 32_768


class TransformersEncoder(TokenEncoder):
    """An encoder from a local checkpoint folder or the Hugging Face Hub.

    Pooling, Dense modules of `modules.json`, truncation and normalisation are computed in float32.

    Args:
        folder: Folder to which paths in the specification are relative.
        device: Device of PyTorch; "auto" is a GPU if available.
        dtype: Dtype of PyTorch for the transformer; "auto" is bfloat16 on a GPU and float32 on a
            processor.

    Raises:
        PairError: If checkpoint or adapter are missing, do not load, or do not match the
            specification.
        ProviderError: If the specification has an adapter and peft is not installed.
    """

    def __init__(
        self, spec: EncoderSpec, folder: Path, *, device: str = "auto", dtype: str = "auto"
    ) -> None:
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if dtype == "auto":
            dtype = "float32" if device == "cpu" else "bfloat16"
        checkpoint = checkpoint_folder(spec, folder)
        adapter = adapter_folder(spec, folder) if spec.adapter else None
        transformer, dense = read_modules(checkpoint, spec.pooling)
        self.spec = spec
        self._device = torch.device(device)
        self.tokenize = checkpoint_tokenizer(spec, transformer)
        self._model = _load_model(spec, transformer, adapter, getattr(torch, dtype))
        self._model.to(self._device).eval()
        self._dense = torch.nn.Sequential(*map(_load_dense, dense)).to(self._device).eval()
        longest = getattr(self._model.config, "max_position_embeddings", spec.max_length)
        if longest < spec.max_length:
            message = (
                f"the maximum length of {spec.model} is {longest} tokens: max_length "
                f"{spec.max_length} in the pair's TOML file is too large"
            )
            raise PairError(
                message, code="max_length_too_large", found=longest, max_length=spec.max_length
            )

    def parts(self) -> tuple[Any, torch.nn.Module, Tokenizer]:
        """Returns the merged transformer, the Dense modules, and a standalone tokenizer."""
        return self._model, self._dense, self.tokenize.standalone()

    @torch.inference_mode()
    def encode_tokens(self, tokens: Sequence[Tokens]) -> Encoding:
        """Encodes texts that `tokenize` returned, in batches of at most 32,768 padded tokens.

        Pooling runs on the device: only pooled vectors are copied from it.

        Raises:
            ProviderError: If the GPU runs out of memory.
            VectorError: If a text has no tokens.
        """
        if not all(map(len, tokens)):
            raise VectorError("a text has no tokens and cannot be pooled", code="no_tokens")
        vectors = [self._encode_batch(batch) for batch in _bounded(tokens)]
        return native_encoding(self.spec, np.concatenate(vectors), tokens)

    def _encode_batch(self, tokens: Sequence[Tokens]) -> FloatArray:
        ids, mask = (torch.from_numpy(array).to(self._device) for array in pad(tokens))
        pooled = None
        with suppress(torch.OutOfMemoryError):
            states = self._model(input_ids=ids, attention_mask=mask).last_hidden_state
            pooled = self._dense(pool_states(states, mask, self.spec.pooling).float())
        if pooled is None:
            # Not chained: the frames of the original error would keep GPU memory allocated.
            message = (
                f"the GPU has too little memory for {len(tokens)} texts of up to "
                f"{max(map(len, tokens))} tokens: use a smaller --batch-size"
            )
            raise ProviderError(message, code="out_of_memory", texts=len(tokens))
        vectors: FloatArray = pooled.cpu().numpy()
        return vectors


def pool_states(states: torch.Tensor, mask: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    """Pools token states on their device.

    Args:
        states: [n, length, width], any floating dtype.
        mask: int64 [n, length], 1 for tokens and 0 for padding on the right.

    Returns:
        [n, width]: float32 means, or states in their dtype.
    """
    if pooling == "cls":
        return states[:, 0]
    if pooling == "last_token":
        last = mask.sum(dim=1)[:, None, None] - 1
        return states.gather(1, last.expand(-1, 1, states.shape[-1]))[:, 0]
    weights = mask.unsqueeze(-1).to(states.dtype)
    total = (states * weights).sum(dim=1, dtype=torch.float32)
    return total / mask.sum(dim=1, keepdim=True)


def _bounded(tokens: Sequence[Tokens]) -> Iterator[Sequence[Tokens]]:
    """Splits texts into batches of consecutive ones; a longer text is a batch of its own."""
    first, longest = 0, 0
    for i, text in enumerate(tokens):
        longest = max(longest, len(text))
        if i > first and (i + 1 - first) * longest > _BATCH_TOKENS:
            yield tokens[first:i]
            first, longest = i, len(text)
    yield tokens[first:]


def _load_dense(folder: Path) -> torch.nn.Module:
    """Loads a Dense module of sentence-transformers: a linear layer and an activation."""
    try:
        config = read_config(folder / "config.json")
        bias = config.get("bias", True)
        linear = torch.nn.Linear(config["in_features"], config["out_features"], bias=bias)
        if (weights := folder / "model.safetensors").is_file():
            state = load_file(weights)
        else:
            state = torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
        linear.load_state_dict({k.removeprefix("linear."): v.float() for k, v in state.items()})
        name = config.get("activation_function", "torch.nn.modules.activation.Tanh")
        if not name.startswith("torch.nn.modules."):
            raise ValueError(f"the activation {name} is not supported")
        activation = getattr(torch.nn, name.rpartition(".")[2])()
    except (OSError, KeyError, ValueError, AttributeError, RuntimeError) as error:
        reason = f"is not a readable Dense module: {error}"
        raise PairError.at(folder, reason, "bad_module") from error
    return torch.nn.Sequential(linear, activation)


def _load_model(spec: EncoderSpec, checkpoint: Path, adapter: Path | None, dtype: Any) -> Any:
    try:
        config = read_configuration(checkpoint, spec.config)
        if adapter:
            return _load_adapted(checkpoint, adapter, config, dtype)
        return _load(AutoModel, checkpoint, config, dtype)
    except CareError:
        raise
    except Exception as error:  # the libraries raise nothing narrower
        path = adapter or checkpoint
        raise PairError.at(path, f"does not load: {error}", "bad_checkpoint") from error


def _load(kind: Any, checkpoint: Path, config: Any, dtype: Any) -> Any:
    options = {"config": config, "dtype": dtype, "output_loading_info": True}
    model, report = kind.from_pretrained(checkpoint, **options)
    # The library initialises missing weights randomly.
    missing = sorted(key for key in report["missing_keys"] if not key.startswith("pooler."))
    if missing:
        reason = f"lacks {len(missing)} weights of the model, for example {missing[0]}"
        raise PairError.at(checkpoint, reason, "missing_weights", weights=missing)
    return model


def _load_adapted(checkpoint: Path, adapter: Path, config: Any, dtype: Any) -> Any:
    try:
        from peft import PeftConfig, PeftModel
    except ModuleNotFoundError as error:
        message = (
            "a LoRA adapter needs peft, which is not installed: pip install 'care-retrieval[train]'"
        )
        raise ProviderError(message, code="missing_package", package="peft") from error
    # The layer names of an adapter depend on the model class with which it was trained.
    causal = PeftConfig.from_pretrained(str(adapter)).task_type == "CAUSAL_LM"
    model = _load(AutoModelForCausalLM if causal else AutoModel, checkpoint, config, dtype)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        adapted = PeftModel.from_pretrained(model, adapter)
    if any("missing adapter keys" in str(warning.message) for warning in caught):
        reason = f"is not an adapter for {checkpoint}: it lacks layers of the model"
        raise PairError.at(adapter, reason, "other_adapter")
    return adapted.merge_and_unload().base_model
