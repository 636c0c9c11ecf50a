"""The indexes of a service, opened for writes with the document encoders of its pairs.

`python -m care.live NAME` builds the base of an index anew, for the writer process.
"""

import os
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from care.indexing import active_settings
from care.options import IndexOptions
from core.aliases import index_of
from core.breaker import Breaker
from core.encoders import Encoder, EncoderSpec, Encoding, OffsetTokenizer, Pair
from core.errors import (
    CareError,
    EmbeddingServerError,
    EmbeddingSpaceError,
    ProviderError,
    TextRejectedError,
)
from core.files import writing_in
from core.locks import exclusive
from core.machine import available_cpus
from core.manifest import IndexManifest
from core.retries import RetryPolicy
from core.scratch import temporary_folder
from core.terminal import run
from core.versions import IndexFolder, list_indexes
from core.writes import Write, Written
from indexer.live.creation import create_index, delete_index
from indexer.live.index import LiveIndex
from indexer.publication import CHANGE_WAIT, IndexWriter
from indexer.update import active_manifest, merge
from models.encoders.factory import (
    EncoderOptions,
    document_encoder,
    query_encoder,
    resolve_backend,
)
from models.pairs import load_pair
from service.pipeline.served_index import make_stores
from service.settings import Settings, plain, read_settings
from stores.token_vectors import token_vector_spec

# How long a measured size is taken for the present one [s].
_MEASURED = 5.0
# A request of a writer is answered within seconds, or sent again.
_RETRIES = RetryPolicy(retries=1, backoff=0.5, longest_wait=5.0)


class Quotas:
    """How much the indexes of a service may take; more is a CareError, `quota_exceeded`."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._sizes: dict[Path, tuple[float, int]] = {}

    def check_number(self) -> None:
        """Checks that there may be one more index."""
        number = sum(
            not (self._settings.indexes / name).is_symlink()
            for name in list_indexes(self._settings.indexes)
        )
        if number >= self._settings.max_indexes:
            raise _exceeded(f"there are {number} indexes", "CARE_MAX_INDEXES")

    def check_bytes(self, name: str) -> None:
        """Checks that more may be written to an index."""
        root = self._settings.indexes
        for folder, what, limit, setting in (
            (root / name, "the index has", self._settings.max_index_bytes, "CARE_MAX_INDEX_BYTES"),
            (root, "all indexes have", self._settings.max_indexes_bytes, "CARE_MAX_INDEXES_BYTES"),
        ):
            if limit and (size := self._size(folder)) >= limit:
                raise _exceeded(f"{what} {size} bytes", setting, limit=limit)

    def _size(self, folder: Path) -> int:
        """Returns the size of all files in a folder, of at most `_MEASURED` ago."""
        until, size = self._sizes.get(folder, (0.0, 0))
        if time.monotonic() >= until:
            size = sum(_file_sizes(folder))
            self._sizes[folder] = time.monotonic() + _MEASURED, size
        return size


def _file_sizes(folder: Path) -> Iterable[int]:
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                yield Path(path, name).lstat().st_size
            except FileNotFoundError:  # it was removed meanwhile
                continue


def _exceeded(found: str, setting: str, **fields: int) -> CareError:
    message = f"{found}, and may not have more ({setting}): delete some, or raise the limit"
    return CareError(message, code="quota_exceeded", setting=setting, **fields)


class BoundedIndex(LiveIndex):
    """An index that takes new documents as long as the quotas allow it, and other writes always."""

    def __init__(self, index: IndexWriter, document_encoder: Encoder, quotas: Quotas) -> None:
        super().__init__(index, document_encoder)
        self._quotas = quotas

    def commit(self, writes: Sequence[Write]) -> list[Written | CareError]:
        """Applies requests in order; see `LiveIndex.commit`."""
        try:
            if any(write.put for write in writes):
                self._quotas.check_bytes(self._index.name)
        except CareError as error:
            others = iter(super().commit([write for write in writes if not write.put]))
            return [error if write.put else next(others) for write in writes]
        return super().commit(writes)


# How long the encoder may take for a batch; one on a processor takes seconds [s].
HANGS = 120.0
# Batches that are encoded at once.
_BATCHES = 4


class LazyEncoder:
    """A document encoder that is loaded when it is used; until it can be, each use fails.

    One that fails repeatedly, or does not return, is not waited for again by each use. Its users
    are threads of several indexes. If each call takes one thread, texts are divided among calls for
    all processors, so that a single document leaves a processor to searches.
    """

    def __init__(self, pair: Pair, options: EncoderOptions) -> None:
        self.spec: EncoderSpec = pair.document
        self._pair, self._options = pair, options
        self._calls = available_cpus() if options.threads == 1 else 1
        self._loaded: Encoder | None = None
        self._lock = Lock()
        self._breaker = Breaker("the document encoder")
        # A call that does not return keeps its thread.
        self._threads = ThreadPoolExecutor(_BATCHES * self._calls, "encode")

    def encode(self, texts: Sequence[str]) -> Encoding:
        """Encodes texts; see `Encoder.encode`."""
        failures = EmbeddingServerError, ProviderError
        with self._breaker.call(*failures, answers=(TextRejectedError,)):
            encoder, count = self._encoder(), max(1, min(self._calls, len(texts)))
            calls = [self._threads.submit(encoder.encode, texts[i::count]) for i in range(count)]
            until = time.monotonic() + HANGS
            try:
                parts = [call.result(until - time.monotonic()) for call in calls]
            except TimeoutError as error:
                for call in calls:
                    call.cancel()
                message = f"the encoder of {self.spec.model} did not return within {HANGS:.0f} s"
                raise ProviderError(message, code="encoder_hangs", seconds=HANGS) from error
        return parts[0] if count == 1 else _in_turn(parts, len(texts))

    def token_offsets(self, text: str) -> Sequence[tuple[int, int]]:
        """Returns the places of the tokens of a text; see `OffsetTokenizer`."""
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


class LiveIndexes:
    """Opens indexes for writes. Each encoder is loaded once, at the first text that it encodes."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._encoders: dict[tuple[str, EncoderOptions], LazyEncoder] = {}
        self._lock = Lock()
        self._quotas = Quotas(settings)
        self._stores = make_stores(settings)

    def open(self, name: str) -> BoundedIndex:
        """Opens an index."""
        index = IndexWriter(self._settings.indexes, name, self._stores)
        return BoundedIndex(index, self._encoder(active_manifest(index)), self._quotas)

    def create(self, name: str, like: str, fields: Sequence[str]) -> dict[str, Any]:
        """Creates an index without documents; see `create_index`.

        Returns:
            `version` and `number` of its active version, and whether it was `created`.
        """
        root = self._settings.indexes
        index = IndexWriter(root, name, self._stores)
        manifest = active_manifest(replace(index, name=index_of(IndexFolder(root, like))))
        # One after another, so that their number is exact.
        with writing_in(root), exclusive(root, "create", wait=CHANGE_WAIT):
            if index.active_or_none() is None:
                self._quotas.check_number()
                self._quotas.check_bytes(name)
            made, created = create_index(index, manifest, self._encoder(manifest), fields)
        return {"version": made.version, "number": made.number, "created": created}

    def delete(self, name: str) -> dict[str, Any]:
        """Deletes an index, and returns the number of its `documents`; see `delete_index`."""
        index = IndexWriter(self._settings.indexes, name, self._stores)
        return {"documents": delete_index(index)}

    def rebuild(self, name: str) -> IndexManifest | None:
        """Joins all segments of an index into one, with one thread; encodes nothing but canaries.

        Returns:
            The manifest of the new version, which is deleted by itself like those of writes; or
            None if the index has one segment, or no documents.
        """
        active = active_manifest(IndexWriter(self._settings.indexes, name, self._stores))
        path, pair = self._pair(active)
        queries = query_encoder(pair, EncoderOptions(threads=1))
        with temporary_folder(self._settings.indexes) as builds:
            given = IndexOptions(
                pair=path,
                indexes=self._settings.indexes,
                builds=builds,
                threads=1,
                milvus_uri=plain(self._settings.milvus_uri) or None,
            )
            base, _, _, options = active_settings(name, given, progress=False)
            return merge(replace(options, live=True), base, self._encoder(base), queries)

    def _encoder(self, manifest: IndexManifest) -> LazyEncoder:
        _, pair = self._pair(manifest)
        options = EncoderOptions(
            backend=manifest.backend,
            dtype=manifest.dtype,
            token_vectors=token_vector_spec(manifest),
        )
        if resolve_backend(pair.document, options.backend) == "onnx":
            options = replace(options, threads=1)
        if url := plain(self._settings.document_url):
            model = self._settings.document_model or None
            options = EncoderOptions(
                backend="openai",
                base_url=url,
                model=model,
                timeout=self._settings.timeout_ms / 1000,
                retries=_RETRIES,
            )
        with self._lock:
            key = pair.name, options
            return self._encoders.setdefault(key, LazyEncoder(pair, options))

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


def _main() -> None:
    os.nice(19)  # searches come first
    LiveIndexes(read_settings()).rebuild(sys.argv[1])


if __name__ == "__main__":
    sys.exit(run(_main))
