"""Vectors and token states of frozen encoders: computed once, read by row, searched.

vectors.json      the encoder that computed the vectors; written first
shard-*           shards of `core.shards`; an id consists of the text's role and checksum
states.values     float16 [tokens, width], unit norm
states.offsets    int64 [texts + 1]
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ValidationError
from torch.nn import functional

from core.encoders import Role
from core.files import new_folder, publish, write_text
from core.rows import Rows, blocks
from core.shards import (
    ShardedVectors,
    complete_shards,
    ids_path,
    incomplete_shards,
    join_journals,
    write_shard,
)
from core.types import FloatArray, RowArray
from stores.exact import exact_search
from training.corpus import KeyArray, Text, key_of
from training.distributed import from_main_process, processes, progress, wait_for_all
from training.encoder import Encoder, EncoderCheckpoint, autocast, encode, tokenize
from training.errors import TrainingError
from training.schema import Precision, Prompts

FILE_NAME = "vectors.json"

_SHARD_ROWS = 65_536
# Texts whose token states are computed at a time, sorted by length.
_SORTED = 2_048
# Documents and queries that are compared at a time: 0.5 GB of scores.
_DOCUMENTS, _QUERIES = 16_384, 8_192


class VectorsRecord(BaseModel):
    """Contents of `vectors.json`."""

    encoder: str  # key of the encoder, which identifies the embedding space
    prompts: Prompts  # prompts of both roles
    dimension: int
    count: int
    shard: int  # rows per shard; the last shard may have fewer


def compute(
    folder: Path,
    checkpoint: EncoderCheckpoint,
    texts: Sequence[Text],
    prompts: Prompts,
    *,
    shard: int = _SHARD_ROWS,
    batch: int,
    precision: Precision,
) -> None:
    """Encodes texts into shards of `shard` rows in `folder`; skips shards that are complete.

    All processes must call this function: each encodes every n-th shard. The files do not depend
    on the number of processes.
    """
    state = processes()
    if state.is_main_process:
        record = VectorsRecord(
            encoder=checkpoint.key,
            prompts=prompts,
            dimension=checkpoint.dimension,
            count=len(texts),
            shard=shard,
        )
        write_text(folder / FILE_NAME, record.model_dump_json(indent=2) + "\n")
        join_journals(folder)
    wait_for_all()
    shards = list(blocks(len(texts), shard))
    mine = range(state.process_index, len(shards), state.num_processes)
    if missing := incomplete_shards(folder, mine):
        encoder = Encoder(checkpoint, trainable=False).to(state.device)
        total = sum(shards[number].stop - shards[number].start for number in missing)
        with progress(total, "vectors", "text") as bar:
            for number in missing:
                rows = texts[shards[number]]
                settings: dict[str, Any] = {"batch": batch, "precision": precision, "bar": bar}
                vectors, tokens = _encode(encoder, rows, prompts, **settings)
                ids = [text.id for text in rows]
                written = {"tokens": tokens, "truncated": 0, "process": state.process_index}
                write_shard(folder, number, vectors, ids, **written)
    wait_for_all()
    if state.is_main_process:
        join_journals(folder)
    wait_for_all()


def _encode(
    encoder: Encoder, texts: Sequence[Text], prompts: Prompts, **settings: Any
) -> tuple[FloatArray, int]:
    """Returns the vectors of texts, float32 [texts, dimension], and the number of tokens."""
    checkpoint = encoder.checkpoint
    vectors = np.empty((len(texts), checkpoint.dimension), dtype=np.float32)
    total = 0
    for role, prompt in prompts:
        selected = [i for i, text in enumerate(texts) if text.role == role]
        if selected:
            tokens = tokenize(checkpoint, prompt, [texts[i].text for i in selected])
            vectors[selected] = encode(encoder, tokens, **settings)
            total += len(tokens.values)
    return vectors, total


@dataclass(frozen=True, slots=True)
class _InRole(Sequence[Text]):
    """Texts that are encoded in the same role."""

    role: Role
    texts: Sequence[str]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: Any) -> Any:
        found = self.texts[index]
        if isinstance(found, str):
            return Text(self.role, found)
        return [Text(self.role, text) for text in found]


def frozen_shards(
    cache: Path,
    checkpoint: EncoderCheckpoint,
    role: Role,
    texts: Sequence[str],
    *,
    batch: int = 32,
    precision: Precision,
) -> ShardedVectors:
    """Returns the vectors of texts by a frozen encoder, of unit norm, cached in `cache`.

    All processes must call this function.
    """
    key = from_main_process(lambda: _key(f"{checkpoint.key} {precision} {role}", role, texts))
    folder = cache / key
    if not from_main_process(folder.exists):
        partial = folder.with_name(f".{folder.name}.partial")
        partial.mkdir(parents=True, exist_ok=True)
        prompts, rows = checkpoint.init.prompts, _InRole(role, texts)
        compute(partial, checkpoint, rows, prompts, batch=batch, precision=precision)
        if processes().is_main_process:
            publish(partial, folder)
        wait_for_all()
    return ShardedVectors(folder, _SHARD_ROWS, np.arange(len(texts)))


def _key(settings: str, role: Role, texts: Sequence[str]) -> str:
    digest = hashlib.sha256(settings.encode())
    for text in texts:
        digest.update(Text(role, text).id.encode())
    return digest.hexdigest()[:16]


class TeacherVectors(ShardedVectors):
    """Vectors on disk, looked up by text; `encoder` is the key of their encoder, None for any.

    All processes must make this object: the main process verifies the files.
    """

    def __init__(
        self, folder: Path, encoder: str | None = None, dimension: int | None = None
    ) -> None:
        path = folder / FILE_NAME
        try:
            record = VectorsRecord.model_validate_json(path.read_text(encoding="utf-8"))
        except (OSError, ValidationError) as error:
            reason = "missing or invalid: run a stage of kind teacher"
            raise TrainingError.at(path, reason, "no_vectors") from error
        if encoder is not None and record.encoder != encoder:
            reason = f"encoder {record.encoder[:12]} computed the vectors, not {encoder[:12]}: "
            reason += "compute them again with the document encoder of this recipe"
            raise TrainingError.at(path, reason, "other_encoder")
        if dimension is not None and record.dimension != dimension:
            reason = f"the vectors have {record.dimension} dimensions, the query encoder has "
            reason += f"{dimension}: set the dimension or projection of the query encoder"
            raise TrainingError.at(path, reason, "dimension_mismatch")
        rows = from_main_process(lambda: [shard.rows for shard in complete_shards(folder)])
        if sum(rows) != record.count:
            reason = f"shard {len(rows)} is missing or damaged: delete the folder and run the "
            reason += "teacher stage again"
            raise TrainingError.at(folder, reason, "damaged_shard", shard=len(rows))
        self.folder = folder
        super().__init__(folder, record.shard, np.arange(record.count))
        paths = (ids_path(folder, number) for number in range(len(rows)))
        keys = (key_of(id_) for path in paths for id_ in path.read_text("utf-8").splitlines())
        found = np.fromiter(keys, np.uint64, record.count)
        self._order = np.argsort(found)
        self._keys = found[self._order]

    def rows(self, keys: KeyArray) -> RowArray:
        """Returns the row of each text's vector, int64 [texts], from the texts' keys."""
        positions = np.searchsorted(self._keys, keys).clip(max=len(self._keys) - 1)
        if missing := int(np.count_nonzero(self._keys[positions] != keys)):
            reason = f"{missing} of {len(keys)} texts have no vector: add their data to the "
            reason += "teacher stage"
            raise TrainingError.at(self.folder, reason, "missing_vectors", missing=missing)
        rows: RowArray = self._order[positions]
        return rows


@torch.no_grad()
def token_states(
    cache: Path,
    checkpoint: EncoderCheckpoint,
    role: Role,
    texts: Sequence[str],
    *,
    max_length: int,
    batch: int = 32,
    precision: Precision,
) -> Rows:
    """Returns the states of each text's tokens in the last layer, unit norm, cached in `cache`.

    `max_length` tokens of a text are encoded, with the prompt and special tokens. Row i, float16
    [tokens, width], has the tokens of text i.
    """
    settings = f"{checkpoint.key} states {precision} {role} {max_length}"
    folder = cache / _key(settings, role, texts)
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        device, init = processes().device, checkpoint.init
        encoder = Encoder(checkpoint, trainable=False).to(device)
        shorter = init.model_copy(update={"max_length": min(max_length, init.max_length)})
        cut = checkpoint.model_copy(update={"init": shorter})
        tokens = tokenize(cut, getattr(init.prompts, role), texts)
        shape = len(tokens.values), encoder.model.config.hidden_size
        with new_folder(folder) as partial, progress(len(texts), "token states", "text") as bar:
            tokens.offsets.tofile(partial / "states.offsets")
            written = np.memmap(partial / "states.values", np.float16, "w+", shape=shape)
            for part in blocks(len(texts), _SORTED):
                order = part.start + np.argsort(tokens.lengths[part], kind="stable")
                for rows in (order[chosen] for chosen in blocks(len(order), batch)):
                    ids, mask = (values.to(device) for values in tokens.padded(rows))
                    with autocast(device, precision):
                        states = encoder.states(ids, mask)
                    unit = functional.normalize(states.float(), dim=-1).half().cpu().numpy()
                    for row, found in zip(rows, unit, strict=True):
                        first, end = tokens.offsets[row], tokens.offsets[row + 1]
                        written[first:end] = found[: end - first]
                    bar.update(len(rows))
            written.flush()
    flat = Rows.open(folder, "states", np.float16)
    return Rows(flat.values.reshape(int(flat.offsets[-1]), -1), flat.offsets)


def search(
    queries: FloatArray, documents: ShardedVectors, k: int, device: torch.device
) -> tuple[FloatArray, RowArray]:
    """Finds the k documents with the largest inner product with each query, float32 [q, d].

    Returns scores, float32 [q, k], descending, and rows, int64 [q, k].
    """
    chunks = documents.chunks(_DOCUMENTS)
    if device.type == "cpu":
        return exact_search(queries, chunks, k)
    scores = torch.full((len(queries), k), -torch.inf, device=device)
    rows = torch.full((len(queries), k), -1, device=device)
    vectors = torch.from_numpy(np.ascontiguousarray(queries)).to(device)
    for first, chunk in chunks:
        part = torch.from_numpy(chunk).to(device)
        for some in blocks(len(queries), _QUERIES):
            found = (vectors[some] @ part.T).topk(min(k, len(part)))
            best = torch.cat([scores[some], found.values], dim=1).topk(k)
            both = torch.cat([rows[some], found.indices + first], dim=1)
            rows[some] = both.gather(1, best.indices)
            scores[some] = best.values
    return scores.cpu().numpy(), rows.cpu().numpy()
