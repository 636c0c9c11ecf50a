"""Encoding of many texts in batches of similar length, with a cache on disk."""

import hashlib
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from core.encoders import Encoder, EncoderSpec
from core.files import atomic
from core.progress import progress_bar
from core.types import FloatArray

SHARD = 4096


def encode_texts(
    encoder: Encoder,
    texts: Sequence[str],
    batch_size: int = 32,
    progress: Callable[[int], object] | None = None,
) -> FloatArray:
    """Encodes n texts, normalised by `core.text`, in batches of similar length, the longest first.

    `progress` is called after each batch with its number of texts.

    Returns:
        float32 [n, dimension], unit norm, in the order of the texts.
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
    """Encodes n texts, normalised by `core.text`, in shards that are cached in `folder`.

    A shard is cached by the checksum of encoder and texts. Pairs that share an encoder share its
    vectors: neither the paths of its files, which have checksums, nor the name of the embedding
    space are a part of the checksum.

    Args:
        load: Loads the encoder; not called if all shards are cached.
        label: Label of the progress bar; "" shows none.

    Returns:
        float32 [n, dimension], unit norm, in the order of the texts.
    """
    unused = {"embedding_space"} | ({"weights", "tokenizer"} if spec.format == "onnx" else set())
    facts = spec.model_dump_json(exclude=unused)
    cache = folder / hashlib.sha256(facts.encode()).hexdigest()[:16]
    cache.mkdir(parents=True, exist_ok=True)
    found = np.empty((len(texts), spec.dimension), np.float32)
    encoder: Encoder | None = None
    with progress_bar(
        label, total=len(texts), unit="texts", leave=False, show=bool(label)
    ) as progress:
        for start in range(0, len(texts), SHARD):
            part = texts[start : start + SHARD]
            path = cache / f"{_checksum(part)}.npy"
            vectors = _read(path, len(part), spec.dimension)
            if vectors is None:
                encoder = encoder or load()
                vectors = encode_texts(encoder, part, batch_size, progress.update)
                with atomic(path) as temporary, temporary.open("wb") as file:
                    np.save(file, vectors)
            else:
                progress.update(len(part))
            found[start : start + len(part)] = vectors
    return found


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
