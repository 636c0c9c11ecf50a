"""Vectors of many texts: encoded in batches of like length, kept on disk."""

import hashlib
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from core.encoders import Encoder, EncoderSpec
from core.files import atomic
from core.types import FloatArray

SHARD = 4096


def encode_texts(
    encoder: Encoder,
    texts: Sequence[str],
    batch_size: int = 32,
    progress: Callable[[int], object] | None = None,
) -> FloatArray:
    """Encodes texts under the text rules in batches of like length, the longest first.

    Returns float32 [n, dimension], unit vectors, row i of text i; calls `progress` with the
    number of texts of each batch that is encoded.
    """
    vectors = np.empty((len(texts), encoder.spec.dimension), dtype=np.float32)
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]), reverse=True)
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        vectors[rows] = encoder.encode([texts[row] for row in rows]).vectors
        if progress:
            progress(len(rows))
    return vectors


def encode_cached(
    load: Callable[[], Encoder],
    spec: EncoderSpec,
    texts: Sequence[str],
    folder: Path,
    *,
    batch_size: int = 32,
    label: str = "",
) -> FloatArray:
    """Encodes texts in shards, each stored under the checksum of its encoder and texts.

    A stored shard is read; an interrupted run resumes at the first that is not stored. `load`
    is not called if all are. The label is that of the progress bar, or "" for none. Returns what
    `encode_texts` does.
    """
    place = folder / hashlib.sha256(spec.model_dump_json().encode()).hexdigest()[:16]
    place.mkdir(parents=True, exist_ok=True)
    shards: list[FloatArray] = []
    encoder: Encoder | None = None
    with tqdm(
        total=len(texts), desc=label, unit=" texts", leave=False, disable=not label
    ) as progress:
        for start in range(0, len(texts), SHARD):
            part = texts[start : start + SHARD]
            path = place / f"{_checksum(part)}.npy"
            vectors = _read(path, len(part), spec.dimension)
            if vectors is None:
                encoder = encoder or load()
                vectors = encode_texts(encoder, part, batch_size, progress.update)
                with atomic(path) as temporary, temporary.open("wb") as file:
                    np.save(file, vectors)
            else:
                progress.update(len(part))
            shards.append(vectors)
    return np.concatenate(shards) if shards else np.empty((0, spec.dimension), np.float32)


def _read(path: Path, count: int, dimension: int) -> FloatArray | None:
    try:
        vectors: FloatArray = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        return None
    return vectors if vectors.shape == (count, dimension) else None


def _checksum(texts: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        encoded = text.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.hexdigest()
