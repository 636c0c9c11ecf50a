"""Vectors of a frozen encoder: computed once, stored as shards, read by rows.

vectors.json     which encoder computed them, written first
shard-*          as `core.shards` describes; an id is the text's role and checksum
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ValidationError

from core.errors import TrainingError
from core.files import write_text
from core.shards import ShardedVectors, ids_path, whole_shards, write_shard
from core.types import FloatArray, Role, RowArray
from models.training.data import Text
from models.training.encoder import Encoder, Side, Tokens, encode, tokenizer
from models.training.folders import publish
from models.training.processes import processes
from models.training.recipe import Precision, Prompts

FILE_NAME = "vectors.json"
_SHARD = 65_536


class VectorsRecord(BaseModel):
    """What `vectors.json` holds.

    Attributes:
        encoder: Key of the encoder that computed them: the space that they lie in.
        prompts: What was put before the texts.
        dimension: Dimensions of a vector.
        count: Number of vectors.
        shard: Rows of every shard but the last.
    """

    encoder: str
    prompts: Prompts
    dimension: int
    count: int
    shard: int


def compute(
    folder: Path,
    side: Side,
    encoder: Encoder,
    texts: Sequence[Text],
    prompts: Prompts,
    *,
    shard: int,
    batch: int,
    precision: Precision,
) -> None:
    """Computes the vectors of texts; goes on behind the last whole shard of an earlier run.

    Args:
        folder: Where they are stored.
        side: The encoder on disk.
        encoder: The encoder.
        texts: The texts.
        prompts: What is put before them, by role.
        shard: Rows of a shard.
        batch: Texts encoded at a time.
        precision: Type of the arithmetic.
    """
    record = VectorsRecord(
        encoder=side.key,
        prompts=prompts,
        dimension=side.dimension,
        count=len(texts),
        shard=shard,
    )
    write_text(folder / FILE_NAME, record.model_dump_json(indent=2) + "\n")
    tokenizers = {role: tokenizer(side, getattr(prompts, role)) for role in ("query", "document")}
    whole = len(whole_shards(folder))
    for number in range(whole, -(-len(texts) // shard)):
        rows = texts[number * shard : (number + 1) * shard]
        vectors = np.empty((len(rows), side.dimension), dtype=np.float32)
        total = 0
        for role, tokenize in tokenizers.items():
            here = [i for i, text in enumerate(rows) if text.role == role]
            if here:
                tokens = Tokens.of(tokenize, [rows[i].text for i in here])
                label = f"vectors, shard {number}"
                vectors[here] = encode(
                    encoder, tokens, batch=batch, precision=precision, label=label
                )
                total += len(tokens.ids)
        ids = [text_id(text.role, text.text) for text in rows]
        write_shard(folder, number, vectors, ids, tokens=total, truncated=0)


def stored(
    cache: Path, side: Side, role: Role, texts: Sequence[str], *, batch: int, precision: Precision
) -> FloatArray:
    """Returns the vectors of texts by a frozen encoder; computed once, then read.

    Args:
        cache: The folder of what was computed before, of this run or another.
        side: The encoder.
        role: As what the texts are encoded.
        texts: The texts.
        batch: Texts encoded at a time.
        precision: Type of the arithmetic.

    Returns:
        float32 [texts, dimension] of unit norm, memory-mapped if they are one shard.
    """
    digest = hashlib.sha256(f"{side.key} {precision} {role}".encode())
    for text in texts:
        digest.update(text_id(role, text).encode())
    folder = cache / digest.hexdigest()[:16]
    with processes().main_process_first():
        if not folder.exists():
            partial = folder.with_name(f".{folder.name}.partial")
            partial.mkdir(parents=True, exist_ok=True)
            encoder = Encoder(side, trainable=False).to(processes().device)
            rows = [Text(role, text) for text in texts]
            prompts = side.start.prompts
            compute(
                partial,
                side,
                encoder,
                rows,
                prompts,
                shard=_SHARD,
                batch=batch,
                precision=precision,
            )
            publish(partial, folder)
    shards = [np.load(path, mmap_mode="r") for path in sorted(folder.glob("shard-*.npy"))]
    return shards[0] if len(shards) == 1 else np.concatenate(shards)


class TeacherVectors:
    """Vectors on disk, by text.

    Args:
        folder: Where they are stored.
        encoder: Key of the encoder that must have computed them, or None for any.
        dimension: Dimensions that they must have, or None for any.

    Raises:
        TrainingError: If they are missing or incomplete, of another space or dimension.
    """

    def __init__(self, folder: Path, encoder: str | None, dimension: int | None) -> None:
        path = folder / FILE_NAME
        try:
            record = VectorsRecord.model_validate_json(path.read_text(encoding="utf-8"))
        except (OSError, ValidationError) as error:
            raise TrainingError(f"{path} is missing or does not describe vectors") from error
        if encoder is not None and record.encoder != encoder:
            raise TrainingError(
                f"{path}: the vectors lie in the space of encoder {record.encoder[:12]}, "
                f"not of {encoder[:12]}: compute them again with the encoder of this recipe"
            )
        if dimension is not None and record.dimension != dimension:
            raise TrainingError(
                f"{path}: the vectors have {record.dimension} dimensions, the encoder "
                f"that learns them {dimension}: set its dimension or projection"
            )
        shards = whole_shards(folder)
        if sum(shard.rows for shard in shards) != record.count:
            raise TrainingError(f"{folder}: shard {len(shards)} is missing or damaged")
        self.folder = folder
        self.dimension = record.dimension
        self._vectors = ShardedVectors(folder, record.shard, np.arange(record.count))
        self.ids = [
            id_
            for number in range(len(shards))
            for id_ in ids_path(folder, number).read_text("utf-8").splitlines()
        ]
        self._row_of = {id_: row for row, id_ in enumerate(self.ids)}

    def rows(self, role: Role, texts: Sequence[str]) -> RowArray:
        """Returns int64 [texts], the row of each text's vector.

        Raises:
            TrainingError: If a text has no vector.
        """
        found = [self._row_of.get(text_id(role, text), -1) for text in texts]
        if missing := found.count(-1):
            raise TrainingError(
                f"{self.folder}: {missing} of {len(texts)} texts as {role} have no vector: "
                "name their data in the teacher stage too"
            )
        return np.array(found, dtype=np.int64)

    def take(self, rows: RowArray) -> FloatArray:
        """Returns float32 [len(rows), dimension], the vectors of these rows."""
        return self._vectors.take(rows)


def text_id(role: Role, text: str) -> str:
    """Returns the id of a text in a role."""
    return f"{role}-{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"
