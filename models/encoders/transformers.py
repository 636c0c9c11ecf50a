"""Encoders that PyTorch runs from a checkpoint of transformers, on a processor or a GPU."""

import json
import warnings
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig

from core.errors import CareError, PairError, ProviderError
from core.types import EncoderSpec, Encoding, FloatArray, Pooling
from core.vectors import pool
from models.encoders.checkpoints import (
    CheckpointTokenizer,
    Tokens,
    adapter_folder,
    as_encoding,
    checkpoint_folder,
)

# By the names of sentence-transformers, before its version 6 and since.
_POOLING: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last_token",
    "cls": "cls",
    "mean": "mean",
    "lasttoken": "last_token",
}


class TransformersEncoder:
    """One side of a pair, from a checkpoint folder or the hub.

    Computes in `dtype`; pooling, a Dense module that `modules.json` names, and the vector
    rules in float32.

    Args:
        spec: The facts of the encoder.
        folder: The folder that the spec's paths are relative to.
        device: A device of PyTorch, or "auto" for a GPU if there is one.
        dtype: A floating-point type of PyTorch, or "auto" for bfloat16 on a GPU and float32
            on the processor.

    Attributes:
        spec: The facts of the encoder.
        concurrent_calls: Calls of `encode_tokens` that keep it at work.

    Raises:
        PairError: If the checkpoint or adapter is missing, does not load, or is not what the
            spec describes.
        ProviderError: If an adapter is named and peft is not installed.
    """

    concurrent_calls = 1

    def __init__(
        self, spec: EncoderSpec, folder: Path, *, device: str = "auto", dtype: str = "auto"
    ) -> None:
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if dtype == "auto":
            dtype = "float32" if device == "cpu" else "bfloat16"
        checkpoint = checkpoint_folder(spec, folder)
        adapter = adapter_folder(spec, folder) if spec.adapter else None
        transformer, dense = modules(checkpoint, spec.pooling)
        self.spec = spec
        self._device = torch.device(device)
        self._tokenizer = CheckpointTokenizer(spec, transformer)
        self._model = _load_model(spec, transformer, adapter, getattr(torch, dtype))
        self._model.to(self._device).eval()
        self._dense = torch.nn.Sequential(*map(_load_dense, dense)).eval()
        longest = getattr(self._model.config, "max_position_embeddings", spec.max_length)
        if longest < spec.max_length:
            raise PairError(
                f"{spec.model} reads {longest} tokens, not max_length {spec.max_length}"
            )

    def parts(self) -> tuple[Any, torch.nn.Module, Tokenizer]:
        """Returns what an export is made of.

        Returns:
            The transformer with an adapter merged into it, the Dense modules behind its
            pooling, and a tokenizer whose file alone makes the same tokens.
        """
        return self._model, self._dense, self._tokenizer.whole()

    def encode(self, texts: Sequence[str]) -> Encoding:
        """Encodes texts as one batch.

        Args:
            texts: At least one text, already under the text rules of `core.text`.

        Returns:
            float32 vectors [n, dimension] of unit norm, with token counts.
        """
        return self.encode_tokens(self.tokenize(texts))

    def tokenize(self, texts: Sequence[str]) -> list[Tokens]:
        """Tokenizes texts behind the encoder's prompt, cut to the encoder's length."""
        return self._tokenizer(texts)

    @torch.inference_mode()
    def encode_tokens(self, tokens: Sequence[Tokens]) -> Encoding:
        """Encodes what `tokenize` returned, as one batch.

        Raises:
            ProviderError: If the GPU has too little memory for it.
        """
        try:
            pooled = self._pooled(tokens)
        except torch.OutOfMemoryError:
            pooled = None
        if pooled is None:
            # Not raised from that error, whose frames hold the memory that fewer texts need.
            raise ProviderError(
                f"the GPU has too little memory for {len(tokens)} texts of up to "
                f"{max(map(len, tokens))} tokens"
            )
        return as_encoding(self.spec, self._dense(torch.from_numpy(pooled)).numpy(), tokens)

    def token_offsets(self, text: str) -> list[tuple[int, int]]:
        """Returns start and end of each token that stands for a text; see `text_offsets`."""
        return self._tokenizer.token_offsets(text)

    def _pooled(self, tokens: Sequence[Tokens]) -> FloatArray:
        ids = np.zeros((len(tokens), max(len(t.ids) for t in tokens)), dtype=np.int64)
        mask = np.zeros_like(ids)
        for row, token in enumerate(tokens):
            ids[row, : len(token.ids)] = token.ids
            mask[row, : len(token.ids)] = 1
        states = self._model(
            input_ids=torch.from_numpy(ids).to(self._device),
            attention_mask=torch.from_numpy(mask).to(self._device),
        ).last_hidden_state
        return pool(states.float().cpu().numpy(), mask, self.spec.pooling)


def modules(checkpoint: Path, pooling: Pooling) -> tuple[Path, list[Path]]:
    """Returns the folders of the transformer and of the Dense modules behind its pooling.

    Raises:
        PairError: If `modules.json` names other modules, or another pooling.
    """
    file = checkpoint / "modules.json"
    if not file.is_file():
        return checkpoint, []
    kinds = ("Transformer", "Pooling", "Dense", "Normalize")
    folders: dict[str, list[Path]] = {kind: [] for kind in kinds}
    for module in json.loads(file.read_text("utf-8")):
        kind = module["type"].rpartition(".")[2]
        if kind not in folders:
            raise PairError(f"{file} names a module {kind}: {', '.join(kinds)} are supported")
        folders[kind].append(checkpoint / module["path"])
    if len(folders["Transformer"]) != 1:
        raise PairError(f"{file} names {len(folders['Transformer'])} transformers instead of one")
    for folder in folders["Pooling"]:
        _check_pooling(folder / "config.json", pooling)
    return folders["Transformer"][0], folders["Dense"]


def _check_pooling(file: Path, pooling: Pooling) -> None:
    if not file.is_file():
        return
    config = json.loads(file.read_text("utf-8"))
    names = [key for key, value in config.items() if value is True and key != "include_prompt"]
    found = [_POOLING.get(name, name) for name in names or [config.get("pooling_mode")]]
    if found != [pooling]:
        raise PairError(f"{file} pools by {found[0]}, not by the pair's pooling {pooling}")


def _load_dense(folder: Path) -> torch.nn.Module:
    """Loads a Dense module of sentence-transformers: a linear layer and an activation."""
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        bias = config.get("bias", True)
        linear = torch.nn.Linear(config["in_features"], config["out_features"], bias=bias)
        if (weights := folder / "model.safetensors").is_file():
            state = load_file(weights)
        else:
            state = torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
        linear.load_state_dict({k.removeprefix("linear."): v.float() for k, v in state.items()})
        name = config.get("activation_function", "torch.nn.modules.activation.Tanh")
        if not name.startswith("torch.nn.modules."):
            raise ValueError(f"activation {name} is unknown")
        activation = getattr(torch.nn, name.rpartition(".")[2])()
    except (OSError, KeyError, ValueError, AttributeError, RuntimeError) as error:
        raise PairError(f"{folder} is not a readable Dense module: {error}") from error
    return torch.nn.Sequential(linear, activation)


def _load_model(spec: EncoderSpec, checkpoint: Path, adapter: Path | None, dtype: Any) -> Any:
    try:
        config = _load_config(spec, checkpoint)
        if adapter:
            return _load_adapted(checkpoint, adapter, config, dtype)
        return _load(AutoModel, checkpoint, config, dtype)
    except CareError:
        raise
    except Exception as error:  # the libraries raise nothing narrower
        raise PairError(f"{adapter or checkpoint} does not load: {error}") from error


def _load_config(spec: EncoderSpec, checkpoint: Path) -> Any:
    """Returns the configuration with the spec's entries, and without any code of its own."""
    written, _ = PreTrainedConfig.get_config_dict(checkpoint)
    remote = written.pop("auto_map", None)
    # The library changes what it is given.
    entries = written | deepcopy(spec.config)
    kind = entries.get("model_type", "")
    try:
        config = AutoConfig.for_model(kind)
    except ValueError as error:
        code = " and its own code is not run" if remote else ""
        raise PairError(
            f"{checkpoint} has the model_type '{kind}', which transformers does not know{code}: "
            "name another in config of the pair's TOML"
        ) from error
    return type(config).from_dict(entries)


def _load(kind: Any, checkpoint: Path, config: Any, dtype: Any) -> Any:
    model, report = kind.from_pretrained(
        checkpoint, config=config, dtype=dtype, output_loading_info=True
    )
    # The library gives random weights to layers that a checkpoint lacks.
    missing = sorted(key for key in report["missing_keys"] if not key.startswith("pooler."))
    if missing:
        raise PairError(f"{checkpoint} lacks {len(missing)} weights of its model: {missing[0]} …")
    return model


def _load_adapted(checkpoint: Path, adapter: Path, config: Any, dtype: Any) -> Any:
    try:
        from peft import PeftConfig, PeftModel
    except ModuleNotFoundError as error:
        raise ProviderError("a LoRA adapter needs peft: pip install peft") from error
    # An adapter names its layers as the class of model did that it was trained on.
    causal = PeftConfig.from_pretrained(str(adapter)).task_type == "CAUSAL_LM"
    model = _load(AutoModelForCausalLM if causal else AutoModel, checkpoint, config, dtype)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        adapted = PeftModel.from_pretrained(model, adapter)
    if any("missing adapter keys" in str(warning.message) for warning in caught):
        raise PairError(f"{adapter} is no adapter of {checkpoint}: it lacks layers of the model")
    return adapted.merge_and_unload().base_model
