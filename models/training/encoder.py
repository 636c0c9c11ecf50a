"""An encoder that can be trained: a checkpoint of transformers, pooling, a linear projection."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from sentence_transformers.sentence_transformer.modules import Dense, Pooling
from tokenizers.processors import Sequence as Processors
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import AutoModel, AutoTokenizer

from core.errors import TrainingError
from core.types import EncoderSpec, FloatArray, Role
from models.encoders.checkpoints import CheckpointTokenizer
from models.training.losses import unit
from models.training.recipe import EncoderStart, Lora, Precision

PROJECTION = "1_Dense"
_POOLING_MODES = {"cls": "cls", "mean": "mean", "last_token": "lasttoken"}
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_TOKENIZER_FILES = (
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab.*",
    "merges.txt",
    "*.model",
)


@dataclass(frozen=True, slots=True)
class Side:
    """One encoder as it lies on disk.

    Attributes:
        folder: A checkpoint: model, tokenizer, and the projection if there is one.
        adapter: The LoRA adapter on it, or None.
        start: What the recipe says of it.
        native_dimension: Dimensions that it computes.
        model: Its name in specs.
        revision: Its revision in specs.
        key: A checksum of everything that it was made from.
    """

    folder: Path
    adapter: Path | None
    start: EncoderStart
    native_dimension: int
    model: str
    revision: str
    key: str

    @property
    def dimension(self) -> int:
        """Dimensions that are kept."""
        return self.start.dimension or self.native_dimension

    def spec(self, role: Role, embedding_space: str, *, prompt: str | None = None) -> EncoderSpec:
        """Returns the facts of this encoder in a role; paths in it are as they are here."""
        return EncoderSpec(
            model=self.model,
            revision=self.revision,
            format="transformers",
            weights=str(self.folder),
            adapter=str(self.adapter) if self.adapter else "",
            role=role,
            dimension=self.dimension,
            native_dimension=self.native_dimension,
            max_length=self.start.max_length,
            pooling=self.start.pooling,
            normalize=True,
            prompt=getattr(self.start.prompts, role) if prompt is None else prompt,
            embedding_space=embedding_space,
        )


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of n texts, one after the other.

    Attributes:
        ids: int32 [tokens].
        starts: int64 [n + 1], where each text begins, and the end.
    """

    ids: np.ndarray[Any, np.dtype[np.int32]]
    starts: np.ndarray[Any, np.dtype[np.int64]]

    @classmethod
    def of(cls, tokenizer: CheckpointTokenizer, texts: Sequence[str]) -> Self:
        """Tokenizes texts behind the tokenizer's prompt, within its length."""
        rows: list[np.ndarray[Any, np.dtype[np.int32]]] = []
        for start in range(0, len(texts), 1024):
            batch = tokenizer(texts[start : start + 1024])
            rows.extend(np.array(tokens.ids, dtype=np.int32) for tokens in batch)
        starts = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum([len(row) for row in rows], out=starts[1:])
        return cls(np.concatenate(rows), starts)

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Tokens of each text."""
        return np.diff(self.starts)

    def padded(self, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Returns int64 ids and mask [n, longest] of these texts, padded on the right."""
        longest = max(int(self.starts[row + 1] - self.starts[row]) for row in rows)
        ids = np.zeros((len(rows), longest), dtype=np.int64)
        mask = np.zeros_like(ids)
        for i, row in enumerate(rows):
            tokens = self.ids[self.starts[row] : self.starts[row + 1]]
            ids[i, : len(tokens)] = tokens
            mask[i, : len(tokens)] = 1
        return torch.from_numpy(ids), torch.from_numpy(mask)


class Encoder(nn.Module):
    """What computes a vector from tokens, in training and in measurements alike.

    Args:
        side: The encoder on disk.
        trainable: Whether its weights, or those of its adapter, are trained.
        dropout: In place of the checkpoint's dropout, or None.
        gradient_checkpointing: Whether layers compute their activations anew for the gradients.

    Raises:
        TrainingError: If the checkpoint does not load or reads fewer tokens than it shall.
    """

    def __init__(
        self,
        side: Side,
        *,
        trainable: bool,
        dropout: float | None = None,
        gradient_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.side = side
        self.trainable = trainable
        self.model = _load_model(side, trainable)
        longest = getattr(self.model.config, "max_position_embeddings", side.start.max_length)
        if longest < side.start.max_length:
            raise TrainingError(
                f"{side.folder} reads {longest} tokens, not max_length {side.start.max_length}"
            )
        dense = side.folder / PROJECTION
        self.projection = Dense.load(str(dense)) if dense.is_dir() else None
        width = self.model.config.hidden_size
        self.pooling = Pooling(width, _POOLING_MODES[side.start.pooling])
        if not trainable:
            self.requires_grad_(False)
        elif side.start.frozen_layers is not None:
            _freeze(self.model, side.start.frozen_layers)
        if dropout is not None:
            _set_dropout(self, dropout)
        if gradient_checkpointing and trainable:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
            if side.start.lora:
                self.model.enable_input_require_grads()
        self.train(trainable)

    def train(self, mode: bool = True) -> Self:
        """Sets the mode; a frozen encoder stays in evaluation mode, without dropout."""
        return super().train(mode and self.trainable)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Returns vectors float32 [n, native dimension], neither truncated nor scaled."""
        return self.pool(self.states(ids, mask), mask)

    def states(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Returns token vectors [n, length, width], in the type of the arithmetic."""
        states: Tensor = self.model(input_ids=ids, attention_mask=mask).last_hidden_state
        return states

    def pool(self, states: Tensor, mask: Tensor) -> Tensor:
        """Returns vectors float32 [n, native dimension] of token vectors."""
        with torch.autocast(states.device.type, enabled=False):
            features = {"token_embeddings": states.float(), "attention_mask": mask}
            features = self.pooling(features)
            if self.projection is not None:
                features = self.projection(features)
        vectors: Tensor = features["sentence_embedding"]
        return vectors

    def embed(self, ids: Tensor, mask: Tensor, mini_batch: int | None = None) -> Tensor:
        """Encodes a batch in parts of similar length.

        With `mini_batch` and gradients, the activations of one part at a time are in memory:
        they are computed anew when the gradient of the part's vectors is known, with the same
        dropout. This is GradCache (arXiv 2101.06983) by way of activation checkpointing; the
        gradients are those of the whole batch.

        Args:
            ids: int64 [n, length].
            mask: int64 [n, length], padding on the right.
            mini_batch: Texts of a part, or None for all in one.

        Returns:
            float32 [n, native dimension], as `forward`.
        """
        if mini_batch is None or len(ids) <= mini_batch:
            return self(ids, mask)  # type: ignore[no-any-return]
        lengths = mask.sum(dim=1)
        order = lengths.argsort(stable=True)
        again = torch.is_grad_enabled() and self.trainable
        parts = []
        for rows in torch.split(order, mini_batch):
            longest = int(lengths[rows[-1]])
            part = ids[rows, :longest], mask[rows, :longest]
            parts.append(checkpoint(self, *part, use_reentrant=False) if again else self(*part))
        return torch.cat(parts)[order.argsort()]

    def save(self, folder: Path, state: dict[str, Tensor] | None = None) -> Side:
        """Writes the weights, or the adapter alone, and the tokenizer.

        Args:
            folder: A new folder.
            state: The model's weights if they are not all here.

        Returns:
            The side that lies there; its key is still the old one.
        """
        folder.mkdir(parents=True)
        self.model.save_pretrained(folder, state_dict=state)
        if self.side.start.lora:
            return replace(self.side, adapter=folder)
        copy_tokenizer(self.side.folder, folder)
        if self.side.start.pooling == "last_token":
            end_texts(folder)
        if self.projection is not None:
            write_projection(folder, self.projection)
        return replace(self.side, folder=folder)


def tokenizer(side: Side, prompt: str) -> CheckpointTokenizer:
    """Returns the tokenizer of a side behind a prompt, as serving will read texts."""
    return CheckpointTokenizer(side.spec("document", "training", prompt=prompt), side.folder)


@torch.no_grad()
def encode(
    encoder: Encoder,
    tokens: Tokens,
    *,
    batch: int,
    precision: Precision = "fp32",
    label: str = "",
) -> FloatArray:
    """Encodes texts in batches of similar length, in evaluation mode.

    Args:
        encoder: The encoder; its mode is restored.
        tokens: The texts.
        batch: Texts of a batch.
        precision: Type of the arithmetic.
        label: Name of the progress bar, or "" for none.

    Returns:
        float32 [n, dimension] of unit norm.
    """
    was_training = encoder.training
    encoder.eval()
    device = next(encoder.parameters()).device
    dimension = encoder.side.dimension
    vectors = np.empty((len(tokens), dimension), dtype=np.float32)
    order = np.argsort(tokens.lengths, kind="stable")
    bar = tqdm(total=len(tokens), desc=label, unit="text", disable=not label, leave=False)
    for start in range(0, len(order), batch):
        rows = order[start : start + batch]
        ids, mask = tokens.padded(rows.tolist())
        with autocast(device, precision):
            raw = encoder(ids.to(device), mask.to(device))
        vectors[rows] = unit(raw, dimension).cpu().numpy()
        bar.update(len(rows))
    bar.close()
    encoder.train(was_training)
    return vectors


def autocast(device: torch.device, precision: Precision) -> torch.autocast:
    """Returns the context in which arithmetic has a precision."""
    return torch.autocast(device.type, _DTYPES.get(precision), enabled=precision != "fp32")


def load_backbone(folder: Path, dtype: str = "float32") -> Any:
    """Loads a checkpoint of transformers without its pooler, which nothing here reads.

    Raises:
        TrainingError: If it does not load or lacks weights of its model.
    """
    try:
        # Unless it is told, the library asks at the terminal whether to run a checkpoint's code.
        model, report = AutoModel.from_pretrained(
            folder,
            dtype=getattr(torch, dtype),
            output_loading_info=True,
            trust_remote_code=False,
        )
    except Exception as error:  # the library raises nothing narrower
        reason = " ".join(str(error).split())
        raise TrainingError(f"{folder} does not load as a checkpoint: {reason}") from error
    missing = sorted(key for key in report["missing_keys"] if not key.startswith("pooler."))
    if missing:
        raise TrainingError(f"{folder} lacks {len(missing)} weights of its model: {missing[0]} …")
    if getattr(model, "pooler", None) is not None:
        model.pooler = None
    return model


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copies the files of a checkpoint's tokenizer as they are."""
    for pattern in _TOKENIZER_FILES:
        for path in source.glob(pattern):
            shutil.copyfile(path, target / path.name)


def end_texts(folder: Path) -> None:
    """Makes a tokenizer end each text with its end-of-text token, for whoever reads the folder.

    The encoders of this project do so by themselves where a tokenizer does not.
    """
    loaded = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    backend, end = loaded.backend_tokenizer, loaded.eos_token
    if end is None or backend.encode("a").special_tokens_mask[-1]:
        return
    template = TemplateProcessing(single=f"$A {end}", special_tokens=[(end, loaded.eos_token_id)])
    before = backend.post_processor
    backend.post_processor = Processors([before, template]) if before else template
    backend.save(str(folder / "tokenizer.json"))


def write_projection(folder: Path, projection: Dense) -> None:
    """Writes a linear layer behind the pooling, as sentence-transformers lays it out."""
    (folder / PROJECTION).mkdir()
    projection.save(str(folder / PROJECTION))
    kinds = (("Transformer", ""), ("Pooling", "1_Pooling"), ("Dense", PROJECTION))
    rows = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(rows), encoding="utf-8")


def _load_model(side: Side, trainable: bool) -> Any:
    model = load_backbone(side.folder, side.start.dtype)
    if trainable and not torch.cuda.is_available():
        # The gradients of fused attention take a third longer on processors.
        model.set_attn_implementation("eager")
    if side.adapter is not None:
        from peft import PeftModel

        # Not `add_adapter`, and not by a wrapper's own loading: both leave the adapter frozen.
        return PeftModel.from_pretrained(model, str(side.adapter), is_trainable=trainable)
    if side.start.lora is not None and trainable:
        return _with_adapter(model, side.start.lora)
    return model


def _with_adapter(model: Any, lora: Lora) -> Any:
    from peft import LoraConfig, TaskType, get_peft_model

    config = LoraConfig(
        task_type=TaskType.FEATURE_EXTRACTION,
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.targets,
    )
    try:
        return get_peft_model(model, config)
    except ValueError as error:
        raise TrainingError(f"lora.targets: {' '.join(str(error).split())}") from error


def _freeze(model: Any, layers: int) -> None:
    """Freezes the embeddings and the first layers of a BERT-like model.

    Raises:
        TrainingError: If the model is laid out in another way, or has not as many layers.
    """
    stack = getattr(getattr(model, "encoder", None), "layer", None)
    if stack is None or not hasattr(model, "embeddings") or layers > len(stack):
        raise TrainingError(f"frozen_layers: {type(model).__name__} shows no {layers} layers")
    for module in (model.embeddings, *stack[:layers]):
        module.requires_grad_(False)


def _set_dropout(module: nn.Module, dropout: float) -> None:
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = dropout
        elif isinstance(getattr(part, "attention_dropout", None), float):
            setattr(part, "attention_dropout", dropout)  # noqa: B010 (modules type it otherwise)
