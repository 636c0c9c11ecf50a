"""An index that takes writes while it is served: each commit makes a version of its requests."""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pyroaring import BitMap

from core.encoders import Encoder, Encoding
from core.errors import CareError, PairError, ProviderError
from core.files import writing_in
from core.locks import lock_holder
from core.manifest import TOKENS, IndexManifest, UpdateRecord
from core.text import document_text
from core.types import Document, FloatArray
from core.writes import Write, Written
from indexer.chunking import Chunker
from indexer.encoding import check_encoded
from indexer.failures import ENCODING_ERRORS, FailureIsolator, IsolationResult
from indexer.live.joining import Joined, join, segments_to_join, write_joined
from indexer.live.requests import Changes, Parsed, Requests, parse
from indexer.live.segment import NewSegment, write_segment
from indexer.live.version import Changed, compose, publish
from indexer.publication import BUILD_LOCK, LIVE_KEY, WRITE, IndexWriter, is_live
from indexer.state import IndexState, check_encoder
from indexer.versions import hide_unused, retire, segment_folders

# How long versions of live writes are kept, and the most of them. They are deleted when they are
# more than a share of all.
KEPT, MOST_KEPT = timedelta(hours=1), 1_000
_RETIRED = 1 / 16
# With more new or deleted rows than this share of the base, and than these, the base is built anew.
MOST_CHANGED, LEAST_CHANGED = 0.2, 4_096
# Rows that may be new, or deleted from a base in Milvus, because services keep segments in memory.
# With a quarter of them the base is built anew.
MOST_BESIDE = 32_768
# Rows of segments that are joined while a build runs, so that the lock for changes is held briefly.
MOST_JOINED = 511
_BATCH = 32


@dataclass
class _Encoded:
    """What the texts of a commit were encoded to, by text."""

    vectors: dict[str, FloatArray] = field(default_factory=dict)
    tokens: dict[str, NDArray[np.uint8]] = field(default_factory=dict)  # [tokens, bytes]
    failed: dict[str, str] = field(default_factory=dict)  # why one cannot be encoded
    error: CareError | None = None  # why the encoder failed for all others


class LiveIndex:
    """An index that takes writes; one per index and process. Other commands may change it too.

    Args:
        index: The folder of the index.
        document_encoder: Encodes new documents; its specification must be that of the index.
        batch_size: Texts that are encoded at a time.

    Raises:
        CareError: If the index takes no writes: it has no active version, its full text is of an
            older release, or it was encoded by another encoder.
    """

    def __init__(
        self, index: IndexWriter, document_encoder: Encoder, *, batch_size: int = _BATCH
    ) -> None:
        self._index = index
        self._encoder = document_encoder
        self._batch_size = batch_size
        self._numbers: dict[str, int] = {}
        self._state: IndexState | None = None
        self._chunker: Chunker | None = None
        base = index.version(self._refresh().manifest.base)
        index.stores.for_version(base).claim(index)

    def commit(self, writes: Sequence[Write]) -> list[Written | CareError]:
        """Applies requests in order, as one version that is on disk and active afterwards.

        Texts are encoded first, without a lock. An error of one request does not concern others.
        If nothing changes, no version is made.

        Returns:
            The result of each request, or the error for which it changes nothing.
        """
        try:
            state = self._refresh()
            parsed = [parse(write, self._chunker) for write in writes]
            encoded = self._encode(state, parsed)
            with writing_in(self._index.path), self._index.changing("write"):
                return self._commit(self._refresh(), parsed, encoded)
        except CareError as error:
            return [error for _ in writes]

    def _commit(
        self, state: IndexState, parsed: Sequence[Parsed], encoded: _Encoded
    ) -> list[Written | CareError]:
        """Does what `commit` does; the index is locked for changes."""
        started = time.perf_counter()
        if not encoded.error:  # another command may have changed a document meanwhile
            self._encode(state, parsed, encoded)
        requests = Requests(state, encoded.failed, self._lacking(state, encoded))
        results = [requests.apply(one) for one in parsed]
        changes = requests.changes()
        manifest = state.manifest
        if changes:
            self._check_room(state, changes)
            removed = BitMap(row for rows in changes.removed.values() for row in rows)
            replaced = len(changes.removed.keys() & changes.new.keys())
            record = UpdateRecord(
                base=manifest.version,
                added=len(changes.new) - replaced,
                replaced=replaced,
                deleted=len(changes.removed) - replaced,
                unchanged=manifest.corpus.documents - len(changes.removed),
            )
            key = hashlib.sha256(manifest.version.encode()).hexdigest()
            with self._index.new_version(LIVE_KEY + key, WRITE) as (version, folder):
                segment = None
                if changes.new:
                    rows = [chunk for chunks in changes.new.values() for chunk in chunks]
                    vectors, tokens = self._vectors(state, changes.sources, rows, encoded)
                    written = write_segment(folder, manifest, rows, [vectors], tokens)
                    segment = NewSegment.of(folder, version, written, manifest)
                changed = Changed(removed, record, segment, encoded=len(encoded.vectors))
                manifest = self._publish(state, version, folder, changed, started)
        return [
            one
            if isinstance(one, CareError)
            else one.written(manifest.version, manifest.number or 0)
            for one in results
        ]

    def _publish(
        self, state: IndexState, version: str, folder: Path, changed: Changed, started: float
    ) -> IndexManifest:
        """Publishes a version, and keeps its segments open; locked for changes."""
        manifest, dead = compose(state, version, changed)
        seconds = round(time.perf_counter() - started, 3)
        manifest = manifest.model_copy(update={"build_seconds": seconds})
        number = self._index.last_number(self._numbers) + 1
        manifest = publish(self._index, folder, manifest, dead, number)
        opened = dict(state.opened)
        if new := changed.segment:
            opened[f"{version} {new.sha256}"] = new.opened
        if joined := changed.joined:
            opened[f"{joined.entry.folder} {joined.entry.sha256}"] = joined.segment.opened
        self._state = IndexState.open(self._index, version, opened, self._index.stores)
        return manifest

    def merge(self) -> bool:
        """Joins small segments, if there are many, and deletes old versions of writes.

        It is called when no write waits; it takes moments, and writes can be committed meanwhile by
        another process. While a build, update or merge runs, which can need what is deleted here,
        only segments of at most `MOST_JOINED` rows are joined, as a write that replaces them.

        Returns:
            Whether a version with fewer segments is active now.

        Raises:
            CareError: `locked`, if another process holds the lock for changes all the time.
        """
        index = self._index
        with writing_in(index.path):
            try:
                with index.building("merge", wait=0.0):
                    state = self._refresh()
                    places = segments_to_join(state.entries)
                    joined = join(index, state, places) if places else None
                    with index.changing("merge"):
                        merged = self._publish_joined(joined)
                        self._retire()
                    index.remove_deleted()
                    return merged
            except CareError as error:
                if error.code == "other_writer":  # each write says so
                    return False
                if error.code != "locked":
                    raise
            with index.changing("merge"):
                return self._publish_joined()

    def _publish_joined(self, joined: Joined | None = None) -> bool:
        """Publishes a version with joined segments, if the active one has all that were joined.

        By default small ones are joined in it. The index is locked for changes.
        """
        state, started = self._refresh(), time.perf_counter()
        places = [] if joined else segments_to_join(state.entries, MOST_JOINED)
        if not (places or (joined and joined.is_of(state))):
            return False
        key = LIVE_KEY + hashlib.sha256(state.manifest.version.encode()).hexdigest()
        with self._index.new_version(key, WRITE) as (version, folder):
            joined = joined or write_joined(state, places, version, folder)
            changed = Changed(BitMap(), joined=joined)
            self._publish(state, version, folder, changed, started)
        return True

    @property
    def is_large(self) -> bool:
        """Whether so much is new or deleted that the base is to be built anew, and now can be.

        A build needs a document.
        """
        if lock_holder(self._index.path / BUILD_LOCK):
            return False
        state = self._refresh()
        base, *others = state.entries
        changed = sum(one.count - one.deleted for one in others) + len(state.deleted)
        most = max(MOST_CHANGED * base.count, LEAST_CHANGED)
        if state.manifest.store == "milvus":
            most = min(most, MOST_BESIDE // 4)
        large = changed > most and state.manifest.count > 0
        return large and all(map(state.stores_vectors, range(len(state.parts))))

    def _check_room(self, state: IndexState, changes: Changes) -> None:
        """Raises CareError if too much would be new or deleted beside a base in Milvus."""
        base, *others = state.entries
        removed = sum(map(len, changes.removed.values()))
        rows = sum(one.count for one in others) + sum(map(len, changes.new.values())) + removed
        if state.manifest.store == "milvus" and rows + base.deleted > MOST_BESIDE:
            message = f"index '{self._index.name}' would have more than {MOST_BESIDE:,} rows that "
            message += "are new or deleted since its base was built: run care merge, which builds "
            message += "it anew, or wait until the service has done so"
            raise CareError(message, code="too_many_changes", limit=MOST_BESIDE)

    def _retire(self) -> None:
        """Deletes versions of live writes that are too old or too many, and what they alone needed.

        That reads the manifests of all versions, so some are deleted together. The index is locked
        for builds and changes.
        """
        index, known = self._index, self._numbers
        index.last_number(known)
        active, oldest = index.active(), f"{datetime.now(UTC) - KEPT:%Y%m%dT%H%M%S.%fZ}"
        live = [one for one in known if is_live(one) and one != active]
        live.sort(key=lambda one: known[one])
        gone = {one for one in live if one < oldest} | {*live[: max(0, len(live) - MOST_KEPT)]}
        if len(gone) > _RETIRED * len(live):
            versions = index.versions()
            needed = segment_folders(index, [one for one in versions if one not in gone])
            retire(index, gone.intersection(versions), needed)
            hide_unused(index, needed)
            for one in gone:
                del known[one]

    def _refresh(self) -> IndexState:
        """Returns the active version; segments that are open stay open."""
        version, before = self._index.latest(), self._state
        if before and before.manifest.version == version:
            return before
        known = before.opened if before else None
        state = IndexState.open(self._index, version, known, self._index.stores)
        if not before or before.parts[0].key != state.parts[0].key:
            check_encoder(state.manifest, self._encoder.spec)
            state.check()
            chunking = state.manifest.chunking
            self._chunker = Chunker(self._encoder, chunking) if chunking else None
        self._state = state
        return state

    def _encode(
        self, state: IndexState, parsed: Sequence[Parsed], encoded: _Encoded | None = None
    ) -> _Encoded:
        """Encodes the texts of documents that the version does not have with the same id."""
        encoded = encoded or _Encoded()
        new = [chunks for one in parsed for chunks in one.documents()]
        found = state.find({chunks[0].parent or chunks[0].id for chunks in new})
        state.documents.read([row for rows in found.values() for row in rows])  # one request
        texts: dict[str, str] = {}  # with the id of a document that has each
        for chunks in new:
            rows = found.get(chunks[0].parent or chunks[0].id, range(0))
            known = self._texts_of(state, rows) if rows else {}
            texts |= {_text(one): one.id for one in chunks if _text(one) not in known}
        for rows in state.find({id_ for one in parsed for id_, _ in one.write.patch}).values():
            if not self._texts_of(state, rows):
                texts |= {_text(one): one.id for one in state.chunks(rows)}
        lacking = [t for t in texts if t not in encoded.vectors and t not in encoded.failed]
        lacking.sort(key=len, reverse=True)
        with_tokens = TOKENS in state.manifest.components

        def encode(some: Sequence[str]) -> Encoding:
            return self._checked(some, [texts.get(text, "") for text in some], with_tokens)

        isolator = FailureIsolator(encode)
        try:
            for start in range(0, len(lacking), self._batch_size):
                batch = lacking[start : start + self._batch_size]
                try:
                    result = IsolationResult([(list(range(len(batch))), encode(batch))])
                    isolator.succeeded()
                except ENCODING_ERRORS as error:
                    result = isolator.encode(batch, error)
                encoded.failed |= {batch[i]: reason for i, reason in result.failed.items()}
                for positions, encoding in result.parts:
                    own = [batch[i] for i in positions]
                    encoded.vectors |= zip(own, encoding.vectors, strict=True)
                    encoded.tokens |= zip(own, encoding.token_vectors or (), strict=False)
        except CareError as error:
            encoded.error = error
        return encoded

    def _checked(self, texts: Sequence[str], ids: Sequence[str], with_tokens: bool) -> Encoding:
        """Encodes texts; CareError for whatever fails, and for what cannot be vectors of them."""
        try:
            encoding = self._encoder.encode(texts)
        except CareError:
            raise
        except Exception as error:
            message = f"the encoder failed: {type(error).__name__}"
            raise ProviderError(message, code="encoder_fails") from error
        check_encoded(encoding.vectors, self._encoder.spec.dimension, ids)
        if with_tokens and len(encoding.token_vectors or ()) != len(texts):
            message = "the index has token vectors, which the encoder does not compute: leave out "
            message += "CARE_DOCUMENT_URL, or run care update --no-token-vectors"
            raise PairError(message, code="no_token_output", model=self._encoder.spec.model)
        return encoding

    def _texts_of(self, state: IndexState, rows: range) -> dict[str, int]:
        """Returns the texts of rows whose vectors can be taken, with their rows."""
        segment = state.rows.locate(rows.start)[0]
        if not state.stores_vectors(segment):
            return {}
        return {_text(state.documents[row]): row for row in rows}

    def _lacking(
        self, state: IndexState, encoded: _Encoded
    ) -> Callable[[Sequence[Document], range], CareError | None]:
        """Returns a function that says why documents that replace others have no vectors."""

        def lacking(chunks: Sequence[Document], old: range) -> CareError | None:
            known = self._texts_of(state, old) if old and encoded.error else {}
            texts = map(_text, chunks)
            if any(t not in known and t not in encoded.vectors for t in texts):
                return encoded.error
            return None

        return lacking

    def _vectors(
        self,
        state: IndexState,
        sources: Mapping[str, range],
        rows: Sequence[Document],
        encoded: _Encoded,
    ) -> tuple[FloatArray, list[NDArray[np.uint8]] | None]:
        """Returns the vectors and token vectors of chunks: encoded, or those of the same text."""
        with_tokens = TOKENS in state.manifest.components
        vectors = np.empty((len(rows), state.manifest.encoder.dimension), np.float32)
        tokens: list[NDArray[np.uint8]] = []
        for at, chunk in enumerate(rows):
            text = _text(chunk)
            if text in encoded.vectors:
                vectors[at] = encoded.vectors[text]
                tokens += [encoded.tokens[text]] if with_tokens else []
                continue
            row = self._texts_of(state, sources[chunk.parent or chunk.id])[text]
            vectors[at] = state.take(np.array([row], np.int64))[0]
            tokens += [state.tokens(row)] if with_tokens else []
        return vectors, tokens if with_tokens else None


def _text(document: Document) -> str:
    return document_text(document.title, document.text)
