"""Documents and queries as vectors, each by its side of a pair."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from core.text import document_text, normalize_text
from core.types import Document, FloatArray
from models.encoders.cached import encode_cached
from models.encoders.loading import load_encoder
from models.pairs import load_pair


def encode_pair(
    name: str,
    documents: Sequence[Document],
    queries: Sequence[str],
    cache: Path,
    *,
    batch_size: int = 32,
    threads: int = 1,
) -> tuple[FloatArray, FloatArray]:
    """Encodes documents and queries, each by its side of a pair; see `encode_cached`.

    Raises:
        PairError: If there is no such pair or it cannot be loaded.
    """
    pair = load_pair(name)
    texts = [document_text(document.title, document.text) for document in documents]
    found, asked = (
        encode_cached(
            partial(load_encoder, spec, pair.folder, threads),
            spec,
            side,
            cache,
            batch_size=batch_size,
            label=f"{name} {spec.role}",
        )
        for spec, side in (
            (pair.document, texts),
            (pair.query, [normalize_text(query) for query in queries]),
        )
    )
    return found, asked
