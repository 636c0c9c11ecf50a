"""Vectors of frozen encoders: computed once, stored as shards, read by row.

vectors.json     the encoder that computed the vectors; written first
shard-*          shards of `core.shards`; an id consists of the text's role and checksum
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ValidationError

from core.encoders import Role
from core.files import publish, write_text
from core.shards import ShardedVectors, complete_shards, ids_path, vectors_path, write_shard
from core.types import FloatArray, RowArray
from training.data import Text
from training.distributed import processes
from training.encoder import Encoder, EncoderCheckpoint, encode, tokenize
from training.errors import TrainingError
from training.schema import Precision, Prompts

FILE_NAME = "vectors.json"

_SHARD_ROWS = 65_536


class VectorsRecord(BaseModel):
    """Contents of `vectors.json`.

    Attributes:
        encoder: Key of the encoder, which identifies the embedding space.
        prompts: Prompts of both roles.
        dimension: Dimensions of the vectors.
        count: Number of vectors.
        shard: Rows per shard; the last shard may have fewer.
    """

    encoder: str
    prompts: Prompts
    dimension: int
    count: int
    shard: int


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
    """Encodes texts into shards in `folder`; resumes after the last complete shard.

    `shard` is the number of rows per shard, `batch` the number of texts encoded at a time.
    """
    encoder = Encoder(checkpoint, trainable=False).to(processes().device)
    record = VectorsRecord(
        encoder=checkpoint.key,
        prompts=prompts,
        dimension=checkpoint.dimension,
        count=len(texts),
        shard=shard,
    )
    write_text(folder / FILE_NAME, record.model_dump_json(indent=2) + "\n")
    for number in range(len(complete_shards(folder)), -(-len(texts) // shard)):
        rows = texts[number * shard : (number + 1) * shard]
        vectors = np.empty((len(rows), checkpoint.dimension), dtype=np.float32)
        total = 0
        for role, prompt in prompts:
            selected = [i for i, text in enumerate(rows) if text.role == role]
            if selected:
                tokens = tokenize(checkpoint, prompt, [rows[i].text for i in selected])
                label = f"vectors, shard {number}"
                found = encode(encoder, tokens, batch=batch, precision=precision, label=label)
                vectors[selected] = found
                total += len(tokens.ids)
        ids = [text_id(text) for text in rows]
        write_shard(folder, number, vectors, ids, tokens=total, truncated=0)


def frozen_vectors(
    cache: Path,
    checkpoint: EncoderCheckpoint,
    role: Role,
    texts: Sequence[str],
    *,
    batch: int = 32,
    precision: Precision,
) -> FloatArray:
    """Returns the vectors of texts by a frozen encoder, cached in the folder `cache`.

    They are float32 [texts, dimension] of unit norm, memory-mapped if there is only one shard.
    """
    rows = [Text(role, text) for text in texts]
    digest = hashlib.sha256(f"{checkpoint.key} {precision} {role}".encode())
    for row in rows:
        digest.update(text_id(row).encode())
    folder = cache / digest.hexdigest()[:16]
    with processes().main_process_first():
        if not folder.exists():
            partial = folder.with_name(f".{folder.name}.partial")
            partial.mkdir(parents=True, exist_ok=True)
            prompts = checkpoint.init.prompts
            compute(partial, checkpoint, rows, prompts, batch=batch, precision=precision)
            publish(partial, folder)
    if len(rows) <= _SHARD_ROWS:
        vectors: FloatArray = np.load(vectors_path(folder, 0), mmap_mode="r")
        return vectors
    every = np.arange(len(rows))
    return ShardedVectors(folder, _SHARD_ROWS, every).take(every)


class TeacherVectors(ShardedVectors):
    """Vectors on disk, looked up by text.

    Args:
        folder: The folder that `compute` wrote.
        encoder: Key of the encoder that must have computed the vectors; None for any.
        dimension: Dimensions that the vectors must have; None for any.

    Raises:
        TrainingError: If vectors are missing, incomplete, or of another encoder or dimension.
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
        shards = complete_shards(folder)
        if sum(shard.rows for shard in shards) != record.count:
            reason = f"shard {len(shards)} is missing or damaged: delete the folder and run the "
            reason += "teacher stage again"
            raise TrainingError.at(folder, reason, "damaged_shard", shard=len(shards))
        self.folder = folder
        super().__init__(folder, record.shard, np.arange(record.count))
        paths = (ids_path(folder, number) for number in range(len(shards)))
        ids = (id_ for path in paths for id_ in path.read_text("utf-8").splitlines())
        self._row_of = {id_: row for row, id_ in enumerate(ids)}

    def rows(self, texts: Sequence[Text]) -> RowArray:
        """Returns the row of each text's vector, int64 [texts].

        Raises:
            TrainingError: If a text has no vector.
        """
        found = [self._row_of.get(text_id(text), -1) for text in texts]
        if missing := found.count(-1):
            reason = f"{missing} of {len(texts)} texts have no vector: add their data to the "
            reason += "teacher stage"
            raise TrainingError.at(self.folder, reason, "missing_vectors", missing=missing)
        return np.array(found, dtype=np.int64)


def text_id(text: Text) -> str:
    """Returns the id of a text: its role and a checksum."""
    return f"{text.role}-{hashlib.blake2b(text.text.encode(), digest_size=16).hexdigest()}"
