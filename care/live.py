"""The indexes of a service, opened for writes with the document encoders of its pairs."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Lock

import numpy as np

from core.encoders import Encoder, EncoderSpec, Encoding, OffsetTokenizer, Pair
from core.errors import CareError, EmbeddingSpaceError
from core.machine import available_cpus
from core.manifest import IndexManifest
from indexer.live.index import LiveIndex
from indexer.publication import IndexWriter
from indexer.update import active_manifest
from models.encoders.factory import (
    BACKENDS,
    DTYPES,
    EncoderOptions,
    document_encoder,
    resolve_backend,
)
from models.pairs import load_pair
from service.settings import Settings, plain
from stores.token_vectors import token_vector_spec


class LiveIndexes:
    """Opens indexes for writes. Each encoder is loaded once, at the first text that it encodes."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._encoders: dict[tuple[str, EncoderOptions], _LazyEncoder] = {}
        self._lock = Lock()

    def open(self, name: str) -> LiveIndex:
        """Opens an index.

        Raises:
            CareError: If it takes no writes; see `LiveIndex`.
            EmbeddingSpaceError: If no pair of the service has its embedding space.
        """
        index = IndexWriter(self._settings.indexes, name)
        return LiveIndex(index, self._encoder(active_manifest(index)))

    def _encoder(self, manifest: IndexManifest) -> "_LazyEncoder":
        space = manifest.encoder.embedding_space
        pair = next((p for p in self._pairs() if p.embedding_space == space), None)
        if pair is None:
            raise EmbeddingSpaceError(
                f"index '{manifest.name}' has the embedding space '{space}', which no pair of the "
                "service has: name one in CARE_OTHER_PAIRS",
                index=manifest.name,
                embedding_space=space,
            )
        options = EncoderOptions(
            backend=manifest.backend if manifest.backend in BACKENDS else "auto",
            dtype=manifest.dtype if manifest.dtype in DTYPES else "auto",
            token_vectors=token_vector_spec(manifest),
        )
        if resolve_backend(pair.document, options.backend) == "onnx":
            options = replace(options, threads=1)
        if url := plain(self._settings.document_url):
            model = self._settings.document_model or None
            options = EncoderOptions(backend="openai", base_url=url, model=model)
        with self._lock:
            key = pair.name, options
            return self._encoders.setdefault(key, _LazyEncoder(pair, options))

    def _pairs(self) -> list[Pair]:
        names = (self._settings.pair, *self._settings.other_pairs)
        return [load_pair(name, self._settings.pairs) for name in names]


class _LazyEncoder:
    """A document encoder that is loaded when it is used; until it can be, each use fails.

    Its users are threads of several indexes. If each call takes one thread, texts are divided among
    calls for all processors, so that a single document leaves a processor to searches.
    """

    def __init__(self, pair: Pair, options: EncoderOptions) -> None:
        self.spec: EncoderSpec = pair.document
        self._pair, self._options = pair, options
        self._calls = available_cpus() if options.threads == 1 else 1
        self._pool = ThreadPoolExecutor(self._calls, "encode")
        self._loaded: Encoder | None = None
        self._lock = Lock()

    def encode(self, texts: Sequence[str]) -> Encoding:
        encoder, calls = self._encoder(), min(self._calls, len(texts))
        if calls <= 1:
            return encoder.encode(texts)
        parts = [texts[i::calls] for i in range(calls)]
        return _in_turn(list(self._pool.map(encoder.encode, parts)), len(texts))

    def token_offsets(self, text: str) -> Sequence[tuple[int, int]]:
        encoder = self._encoder()
        if not isinstance(encoder, OffsetTokenizer):
            message = f"the encoder of {self.spec.model} has no tokenizer"
            raise CareError(message, code="no_token_offsets")
        return encoder.token_offsets(text)

    def _encoder(self) -> Encoder:
        with self._lock:
            self._loaded = self._loaded or document_encoder(self._pair, self._options)
            return self._loaded


def _in_turn(parts: Sequence[Encoding], count: int) -> Encoding:
    """Returns the encoding of a number of texts that were dealt out to `parts` in turn."""
    order = np.argsort(np.arange(count) % len(parts), kind="stable")
    places = np.argsort(order)
    tokens = [vectors for part in parts for vectors in part.token_vectors or ()]
    return Encoding(
        np.concatenate([part.vectors for part in parts])[places],
        np.concatenate([part.token_counts for part in parts])[places],
        np.concatenate([part.truncated for part in parts])[places],
        [tokens[place] for place in places.tolist()] if tokens else None,
    )
