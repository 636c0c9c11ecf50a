"""Trainable encoders: a transformers checkpoint, pooling and an optional linear projection."""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field
from sentence_transformers.sentence_transformer.modules import Dense, Pooling
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute
from transformers import AutoModel

from core.encoders import EncoderSpec, Role
from core.errors import CareError
from core.progress import Progress
from core.rows import Rows, RowsWriter, blocks, offsets_of
from core.types import FloatArray
from models.encoders.checkpoints import checkpoint_tokenizer
from models.encoders.configuration import read_configuration
from models.encoders.modules import read_modules, write_modules
from models.encoders.tokenizer import TextTokenizer
from training.distributed import gather, processes, progress, shard, whole_state
from training.errors import TrainingError
from training.files import checksum
from training.losses import l2_normalize
from training.schema import EncoderInit, Precision

# Texts that are tokenized at a time.
_TOKENIZED = 1_024
PROJECTION = "1_Dense"
_POOLING_MODES = {"cls": "cls", "mean": "mean", "last_token": "lasttoken"}
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_TOKENIZER_FILES = ("*token*.json", "chat_template*", "vocab.*", "merges.txt", "*.model")


class EncoderCheckpoint(BaseModel):
    """An encoder on disk."""

    model_config = ConfigDict(frozen=True)

    folder: Path  # model, tokenizer and, if there is one, the projection
    adapter: Path | None  # folder of a LoRA adapter
    # Entries that replace those of the model's config.json.
    config: dict[str, Any] = Field(default_factory=dict)
    init: EncoderInit  # the encoder's entry in the recipe
    native_dimension: int  # dimensions of the vectors before truncation
    model: str  # name of the model in specs
    revision: str
    # The spec of the ONNX graph that the weights were read from, with absolute paths; None if they
    # were trained or changed, or come from a checkpoint.
    graph: EncoderSpec | None = None
    key: str  # checksum of everything that the encoder was made from

    @property
    def dimension(self) -> int:
        """Dimensions of the vectors after truncation."""
        return self.init.dimension or self.native_dimension

    def moved(self, move: Callable[[Path], Path]) -> Self:
        """Returns a copy with `move` applied to its paths."""
        adapter = move(self.adapter) if self.adapter else None
        return self.model_copy(update={"folder": move(self.folder), "adapter": adapter})

    def spec(self, role: Role, embedding_space: str, *, prompt: str | None = None) -> EncoderSpec:
        """Returns the spec of this encoder in a role; `prompt` replaces the prompt of the role."""
        return EncoderSpec(
            model=self.model,
            revision=self.revision,
            format="transformers",
            weights=str(self.folder),
            adapter=str(self.adapter) if self.adapter else "",
            config=self.config,
            role=role,
            dimension=self.dimension,
            native_dimension=self.native_dimension,
            max_length=self.init.max_length,
            pooling=self.init.pooling,
            normalize=True,
            prompt=getattr(self.init.prompts, role) if prompt is None else prompt,
            embedding_space=embedding_space,
        )


class Tokens(Rows):
    """Token ids of texts: `values`, int32 [tokens], and `offsets`."""

    def padded(self, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Returns ids and mask, int64 [rows, longest], of some texts, padded on the right."""
        numbers = np.asarray(rows)
        first, end = self.offsets[numbers], self.offsets[numbers + 1]
        positions = first[:, None] + np.arange((end - first).max())
        mask = positions < end[:, None]
        ids = np.where(mask, self.values.take(positions, mode="clip"), 0)
        return torch.from_numpy(ids).long(), torch.from_numpy(mask).long()


class Encoder(nn.Module):
    """Computes text vectors from tokens, in training and in evaluation.

    Args:
        trainable: Whether the weights get gradients; with LoRA, those of the adapter only.
            Trained weights are float32, whatever the checkpoint's dtype: the updates of an
            optimizer are too small for 16 bits.
        dropout: Replaces the checkpoint's dropout.
        gradient_checkpointing: Whether layers recompute activations in the backward pass.

    Raises:
        TrainingError: If the checkpoint does not load or supports fewer tokens than `max_length`.
    """

    def __init__(
        self,
        checkpoint: EncoderCheckpoint,
        *,
        trainable: bool,
        dropout: float | None = None,
        gradient_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.checkpoint = checkpoint
        self.trainable = trainable
        self._sharded = False
        self.model = _load_model(checkpoint, trainable)
        init = checkpoint.init
        longest = getattr(self.model.config, "max_position_embeddings", init.max_length)
        if longest < init.max_length:
            reason = f"the model supports {longest} tokens; max_length is {init.max_length}"
            raise TrainingError.at(checkpoint.folder, reason, "max_length_too_large")
        _, dense = read_modules(checkpoint.folder, init.pooling)
        self.projection = Dense.load(str(dense[0])) if dense else None
        width = self.model.config.hidden_size
        self.pooling = Pooling(width, _POOLING_MODES[init.pooling])
        if not trainable:
            self.requires_grad_(False)
        elif init.frozen_layers is not None:
            _freeze(self.model, init.frozen_layers)
        for value in self.parameters():
            if value.requires_grad:
                value.data = value.data.float()
        if dropout is not None:
            _set_dropout(self, dropout)
        if gradient_checkpointing and trainable:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
            if init.lora:
                self.model.enable_input_require_grads()
        self.train(trainable)

    def train(self, mode: bool = True) -> Self:
        """Sets the mode; a frozen encoder always stays in evaluation mode, without dropout."""
        return super().train(mode and self.trainable)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Returns float32 [n, native dimension] of any norm, for int64 [n, length]."""
        return self.pool(self.states(ids, mask), mask)

    def states(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Returns token vectors, [n, length, width] in the dtype of the computation."""
        states: Tensor = self.model(input_ids=ids, attention_mask=mask).last_hidden_state
        return states

    def pool(self, states: Tensor, mask: Tensor) -> Tensor:
        """Pools token vectors [n, length, width] to float32 [n, native dimension]."""
        with torch.autocast(states.device.type, enabled=False):
            features = {"token_embeddings": states.float(), "attention_mask": mask}
            features = self.pooling(features)
            if self.projection is not None:
                features = self.projection(features)
        vectors: Tensor = features["sentence_embedding"]
        return vectors

    def embed(self, ids: Tensor, mask: Tensor, mini_batch: int | None = None) -> Tensor:
        """Encodes a batch, padded on the right, in mini-batches of texts of similar length.

        `ids` and `mask` are int64 [n, length]; returns float32 [n, native dimension]. With
        `mini_batch` and gradients, only the activations of one mini-batch are in memory: the
        backward pass recomputes them with the same dropout. This is GradCache (arXiv 2101.06983)
        by means of activation checkpointing; the gradients equal those of the whole batch.
        """
        if mini_batch is None:
            return self(ids, mask)  # type: ignore[no-any-return]
        count = -(-len(ids) // mini_batch)
        if self._sharded:
            # Processes gather weights together, so all must compute as many mini-batches.
            count = max(gather(count))
        if count == 1:
            return self(ids, mask)  # type: ignore[no-any-return]
        lengths = mask.sum(dim=1)
        order = lengths.argsort(stable=True)
        padding = max(0, (count - 1) * mini_batch + 1 - len(ids))
        recomputes = torch.is_grad_enabled() and self.trainable
        parts = []
        for rows in torch.split(torch.cat([order[:1].expand(padding), order]), mini_batch):
            longest = int(lengths[rows[-1]])
            part = ids[rows, :longest], mask[rows, :longest]
            parts.append(recompute(self, *part, use_reentrant=False) if recomputes else self(*part))
        return torch.cat(parts)[padding:][order.argsort()]

    def shard(self) -> None:
        """Shards the model's weights over all processes; all of them must encode together."""
        shard(self.model)
        self._sharded = True

    def save(self, folder: Path) -> EncoderCheckpoint:
        """Writes the adapter, or weights and tokenizer, into a new folder.

        All processes must call it. The returned checkpoint still has the old key.
        """
        lora = self.checkpoint.init.lora is not None
        state = whole_state(self.model, trained=lora)
        changes = {"adapter": folder} if lora else {"folder": folder, "config": {}}
        saved = self.checkpoint.model_copy(update=changes)
        if not processes().is_main_process:
            return saved
        folder.mkdir(parents=True)
        self.model.save_pretrained(folder, state_dict=state)
        if lora:
            return saved
        copy_tokenizer(self.checkpoint.folder, folder)
        if self.checkpoint.init.pooling == "last_token":
            # Encoders of this project append the end token; other libraries rely on the tokenizer.
            standalone_tokenizer(self.checkpoint).save(str(folder / "tokenizer.json"))
        write_layout(folder, self.checkpoint.init, self.projection)
        return saved


def load_backbone(
    folder: Path, dtype: str = "float32", config: Mapping[str, Any] | None = None
) -> Any:
    """Loads a checkpoint without its pooler; `config` replaces entries of config.json."""
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


def _freeze(model: Any, layers: int) -> None:
    """Freezes the embeddings and the first layers of a BERT-like model."""
    stack = getattr(getattr(model, "encoder", None), "layer", None)
    if stack is None or not hasattr(model, "embeddings") or layers > len(stack):
        reason = f"cannot freeze {layers} layers of {type(model).__name__}: it is not a BERT-like "
        reason += f"model with at least {layers} layers"
        raise TrainingError.at("frozen_layers", reason, "no_such_layer")
    for module in (model.embeddings, *stack[:layers]):
        module.requires_grad_(False)


def _set_dropout(module: nn.Module, dropout: float) -> None:
    """Replaces the dropout of all layers, also that of attention."""
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = dropout
        elif isinstance(getattr(part, "attention_dropout", None), float):
            setattr(part, "attention_dropout", dropout)  # noqa: B010 (typed as a module)


def tokenize(checkpoint: EncoderCheckpoint, prompt: str, texts: Sequence[str]) -> Tokens:
    """Tokenizes texts with a prompt, truncated to the encoder's length, as at serving."""
    parts = list(_tokenized(checkpoint, prompt, texts))
    lengths = [length for _, part in parts for length in part]
    values = np.concatenate([part for part, _ in parts])
    return Tokens(values, offsets_of(np.array(lengths)))


def write_tokens(
    folder: Path, name: str, checkpoint: EncoderCheckpoint, prompt: str, texts: Sequence[str]
) -> None:
    """Writes the token ids of texts, as of `tokenize`, to the files of `Rows`."""
    with RowsWriter(folder, name) as writer, progress(len(texts), "tokens", "text") as bar:
        for values, lengths in _tokenized(checkpoint, prompt, texts):
            writer.extend(values, lengths)
            bar.update(len(lengths))


def _tokenized(
    checkpoint: EncoderCheckpoint, prompt: str, texts: Sequence[str]
) -> Iterator[tuple[NDArray[np.int32], list[int]]]:
    """Yields the token ids of blocks of texts, and the number of each text's."""
    tokenizer = _tokenizer(checkpoint, prompt)
    for rows in blocks(len(texts), _TOKENIZED):
        found = tokenizer(texts[rows])
        ids = chain.from_iterable(tokens.ids for tokens in found)
        yield np.fromiter(ids, np.int32), [len(tokens) for tokens in found]


def tokenizer_key(checkpoint: EncoderCheckpoint, prompt: str) -> str:
    """Returns a checksum of everything that the token ids of a text depend on."""
    tokenizer = standalone_tokenizer(checkpoint).to_str()
    return checksum([tokenizer, prompt, checkpoint.init.max_length])


def autocast(device: torch.device, precision: Precision) -> torch.autocast:
    """Returns a context in which torch computes with a precision."""
    return torch.autocast(device.type, _DTYPES.get(precision), enabled=precision in _DTYPES)


def fast_bf16() -> bool:
    """Returns whether this machine has instructions for bf16; without x86-64 it is taken to."""
    if torch.cuda.is_available():
        return True
    found = torch.cpu.get_capabilities()
    bf16 = found["avx512_bf16"] or found["amx_bf16"]
    return found["architecture"] != "x86_64" or bool(bf16)


def standalone_tokenizer(checkpoint: EncoderCheckpoint) -> Tokenizer:
    """Returns the encoder's tokenizer; it adds special tokens, neither prompt nor truncation."""
    return _tokenizer(checkpoint, "").standalone()


@torch.no_grad()
def encode(
    encoder: Encoder,
    tokens: Tokens,
    *,
    batch: int,
    precision: Precision = "fp32",
    bar: Progress | None = None,
) -> FloatArray:
    """Returns vectors, float32 [n, dimension] of unit norm, computed in evaluation mode."""
    was_training = encoder.training
    encoder.eval()
    device = next(encoder.parameters()).device
    dimension = encoder.checkpoint.dimension
    vectors = np.empty((len(tokens), dimension), dtype=np.float32)
    order = np.argsort(tokens.lengths, kind="stable")
    for start in range(0, len(order), batch):
        rows = order[start : start + batch]
        ids, mask = tokens.padded(rows.tolist())
        with autocast(device, precision):
            raw = encoder(ids.to(device), mask.to(device))
        vectors[rows] = l2_normalize(raw, dimension).cpu().numpy()
        if bar is not None:
            bar.update(len(rows))
    encoder.train(was_training)
    return vectors


def _tokenizer(checkpoint: EncoderCheckpoint, prompt: str) -> TextTokenizer:
    spec = checkpoint.spec("document", "training", prompt=prompt)
    return checkpoint_tokenizer(spec, checkpoint.folder)


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copies the files of a checkpoint's tokenizer unchanged."""
    for pattern in _TOKENIZER_FILES:
        for path in source.glob(pattern):
            shutil.copyfile(path, target / path.name)


def write_layout(folder: Path, init: EncoderInit, projection: Dense | None) -> None:
    """Adds the files of sentence-transformers: pooling, prompts and a projection, if any."""
    if projection is not None:
        (folder / PROJECTION).mkdir()
        projection.save(str(folder / PROJECTION))
    write_modules(
        folder,
        init.pooling,
        max_length=init.max_length,
        prompts=init.prompts.model_dump(),
        dense=[PROJECTION] if projection is not None else [],
    )


def _load_model(checkpoint: EncoderCheckpoint, trainable: bool) -> Any:
    model = load_backbone(checkpoint.folder, checkpoint.init.dtype, checkpoint.config)
    if trainable and not torch.cuda.is_available():
        # The backward pass of fused attention takes a third longer on CPUs.
        model.set_attn_implementation("eager")
    lora = checkpoint.init.lora
    if checkpoint.adapter is None and (lora is None or not trainable):
        return model
    from peft import LoraConfig, PeftModel, TaskType, get_peft_model

    if checkpoint.adapter is not None or lora is None:
        # `add_adapter` and transformers' own loading of adapters leave the adapter frozen.
        return PeftModel.from_pretrained(model, str(checkpoint.adapter), is_trainable=trainable)
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
        raise TrainingError.at("lora.targets", str(error), "bad_targets") from error
