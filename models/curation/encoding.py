"""Vectors of many texts, kept on disk so that a killed command goes on where it was."""

import hashlib
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from numpy.lib.format import open_memmap
from tqdm import tqdm

from core.errors import ProviderError
from core.files import write_text
from core.text import document_text, normalize_text
from core.types import Document, Encoder, EncoderSpec, FloatArray
from models.pairs import load_pair

# Texts between two notes of how far the work is.
_BLOCK = 2048


def load_encoder(spec: EncoderSpec, folder: Path, threads: int) -> Encoder:
    """Returns one side of a pair, by ONNX Runtime or transformers.

    Raises:
        PairError: If its files are missing or do not fit the spec.
        ProviderError: If what it runs on is not installed.
    """
    if spec.format == "onnx":
        from models.encoders.onnx import OnnxEncoder

        return OnnxEncoder(spec, folder, threads)
    try:
        from models.encoders.transformers import TransformersEncoder
    except ModuleNotFoundError as error:
        raise ProviderError(
            f"{error.name} is not installed: pip install torch transformers"
        ) from error
    return TransformersEncoder(spec, folder)


def encode_pair(
    name: str,
    documents: Sequence[Document],
    queries: Sequence[str],
    cache: Path,
    *,
    batch_size: int = 32,
    threads: int = 1,
) -> tuple[FloatArray, FloatArray]:
    """Encodes documents and queries, each by its side of a pair; see `encode_texts`.

    Raises:
        PairError: If there is no such pair or it cannot be loaded.
    """
    pair = load_pair(name)
    texts = [document_text(document.title, document.text) for document in documents]
    found, asked = (
        encode_texts(
            partial(load_encoder, spec, pair.folder, threads), spec, side, cache, batch_size
        )
        for spec, side in (
            (pair.document, texts),
            (pair.query, [normalize_text(query) for query in queries]),
        )
    )
    return found, asked


def encode_texts(
    encoder: Callable[[], Encoder],
    spec: EncoderSpec,
    texts: Sequence[str],
    cache: Path,
    batch_size: int = 32,
) -> FloatArray:
    """Encodes texts, or reads what an earlier run with equal texts and spec has encoded.

    Args:
        encoder: Makes the encoder; not called if all vectors are there.
        spec: The facts of the encoder.
        texts: The texts, under the text rules of `core.text`.
        cache: The folder for vectors.
        batch_size: Texts that are encoded at once, of about one length.

    Returns:
        float32 [n, dimension], read-only, mapped from disk.
    """
    cache.mkdir(parents=True, exist_ok=True)
    identity = json.dumps([spec.model_dump(mode="json"), batch_size, texts])
    name = hashlib.sha256(identity.encode()).hexdigest()[:24]
    path, note = cache / f"{name}.npy", cache / f"{name}.done"
    done = int(note.read_text("utf-8")) if note.is_file() and path.is_file() else 0
    if done < len(texts):
        shape = (len(texts), spec.dimension)
        vectors = open_memmap(path, "r+" if done else "w+", np.float32, shape)
        work = encoder()
        progress = tqdm(total=len(texts), initial=done, desc=f"encode {spec.role}", unit=" texts")
        with progress:
            for start in range(done, len(texts), _BLOCK):
                rows = range(start, min(start + _BLOCK, len(texts)))
                by_length = sorted(rows, key=lambda row: len(texts[row]))
                for at in range(0, len(by_length), batch_size):
                    batch = by_length[at : at + batch_size]
                    vectors[batch] = work.encode([texts[row] for row in batch]).vectors
                    progress.update(len(batch))
                vectors.flush()
                write_text(note, str(rows.stop))
        del vectors
    loaded: FloatArray = np.load(path, mmap_mode="r")
    return loaded
