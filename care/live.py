"""The indexes of a service, opened for writes with the document encoders of its pairs.

`python -m care.live NAME` builds the base of an index anew, for the writer process.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from threading import Lock

from care.indexing import active_settings
from care.options import IndexOptions
from core.cli import run
from core.encoders import Encoder, EncoderSpec, Encoding, OffsetTokenizer, Pair
from core.errors import CareError, EmbeddingSpaceError
from core.manifest import IndexManifest
from core.scratch import temporary_folder
from indexer.live.index import LiveIndex
from indexer.publication import IndexWriter
from indexer.update import active_manifest, merge
from models.encoders.factory import (
    BACKENDS,
    DTYPES,
    EncoderOptions,
    document_encoder,
    query_encoder,
)
from models.pairs import load_pair
from service.settings import Settings, plain, read_settings
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

    def rebuild(self, name: str) -> IndexManifest | None:
        """Joins all segments of an index into one, with one thread; encodes nothing but canaries.

        Returns:
            The manifest of the new version, which is deleted by itself like those of writes; or
            None if the index has one segment.

        Raises:
            CareError: If it fails; the active version does not change.
        """
        active = active_manifest(IndexWriter(self._settings.indexes, name))
        path, pair = self._pair(active)
        queries = query_encoder(pair, EncoderOptions(threads=1))
        with temporary_folder(self._settings.indexes) as builds:
            given = IndexOptions(
                pair=path, indexes=self._settings.indexes, builds=builds, threads=1
            )
            base, _, _, options = active_settings(name, given, progress=False)
            return merge(replace(options, live=True), base, self._encoder(base), queries)

    def _encoder(self, manifest: IndexManifest) -> "_LazyEncoder":
        _, pair = self._pair(manifest)
        options = EncoderOptions(
            backend=manifest.backend if manifest.backend in BACKENDS else "auto",
            dtype=manifest.dtype if manifest.dtype in DTYPES else "auto",
            token_vectors=token_vector_spec(manifest),
        )
        if url := plain(self._settings.document_url):
            model = self._settings.document_model or None
            options = EncoderOptions(backend="openai", base_url=url, model=model)
        with self._lock:
            key = pair.name, options
            return self._encoders.setdefault(key, _LazyEncoder(pair, options))

    def _pair(self, manifest: IndexManifest) -> tuple[str, Pair]:
        """Returns the pair of the service that has the space of an index, after its name."""
        space = manifest.encoder.embedding_space
        for name in (self._settings.pair, *self._settings.other_pairs):
            if (pair := load_pair(name, self._settings.pairs)).embedding_space == space:
                return name, pair
        raise EmbeddingSpaceError(
            f"index '{manifest.name}' has the embedding space '{space}', which no pair of the "
            "service has: name one in CARE_OTHER_PAIRS",
            index=manifest.name,
            embedding_space=space,
        )


class _LazyEncoder:
    """A document encoder that is loaded when it is used; until it can be, each use fails.

    Its users are threads of several indexes.
    """

    def __init__(self, pair: Pair, options: EncoderOptions) -> None:
        self.spec: EncoderSpec = pair.document
        self._pair, self._options = pair, options
        self._loaded: Encoder | None = None
        self._lock = Lock()

    def encode(self, texts: Sequence[str]) -> Encoding:
        return self._encoder().encode(texts)

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


def _main() -> None:
    os.nice(19)  # searches come first
    LiveIndexes(read_settings()).rebuild(sys.argv[1])


if __name__ == "__main__":
    sys.exit(run(_main))
