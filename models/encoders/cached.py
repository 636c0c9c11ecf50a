"""Vectors of texts on disk, so that no system encodes a text twice."""

import hashlib
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from core.files import atomic
from core.types import Encoder, EncoderSpec, FloatArray

SHARD = 4096


def encode_cached(
    make_encoder: Callable[[], Encoder],
    spec: EncoderSpec,
    texts: Sequence[str],
    folder: Path,
    *,
    batch_size: int,
    label: str,
) -> FloatArray:
    """Encodes texts in shards, each kept under the checksum of its spec and texts.

    A shard that is there is read; a killed run goes on at the first that is not. Inside a
    shard texts are sorted by length.

    Args:
        make_encoder: Makes what encodes them; not called if all vectors are there.
        spec: The facts of the encoder.
        texts: n texts under the text rules.
        folder: Where the shards lie; made if it is not there.
        batch_size: Texts in a batch.
        label: What the progress bar says.

    Returns:
        float32 vectors [n, dimension] of unit norm.
    """
    place = folder / _key(spec)
    place.mkdir(parents=True, exist_ok=True)
    shards: list[FloatArray] = []
    encoder: Encoder | None = None
    with tqdm(total=len(texts), desc=label, unit=" texts", leave=False) as bar:
        for start in range(0, len(texts), SHARD):
            part = texts[start : start + SHARD]
            path = place / f"{_checksum(part)}.npy"
            vectors = _read(path, len(part), spec.dimension)
            if vectors is None:
                encoder = encoder or make_encoder()
                vectors = _encode(encoder, part, batch_size, bar)
                with atomic(path) as temporary, temporary.open("wb") as file:
                    np.save(file, vectors)
            else:
                bar.update(len(part))
            shards.append(vectors)
    return np.concatenate(shards) if shards else np.empty((0, spec.dimension), np.float32)


def _encode(
    encoder: Encoder, texts: Sequence[str], batch_size: int, bar: "tqdm[Any]"
) -> FloatArray:
    vectors = np.empty((len(texts), encoder.spec.dimension), dtype=np.float32)
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]), reverse=True)
    for at in range(0, len(order), batch_size):
        rows = order[at : at + batch_size]
        vectors[rows] = encoder.encode([texts[row] for row in rows]).vectors
        bar.update(len(rows))
    return vectors


def _read(path: Path, count: int, dimension: int) -> FloatArray | None:
    try:
        vectors: FloatArray = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        return None
    return vectors if vectors.shape == (count, dimension) else None


def _key(spec: EncoderSpec) -> str:
    return hashlib.sha256(spec.model_dump_json().encode()).hexdigest()[:16]


def _checksum(texts: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        encoded = text.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.hexdigest()
