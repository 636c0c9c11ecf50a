"""Encoding over the actors of a Ray cluster, from and to a shared folder or object store.

A shard travels as a small corpus and comes back as the shard that the local engine makes of it:

<shard>/texts/documents.arrow   the documents to encode
<shard>/attempts                how many workers have begun with them
<shard>/vectors/                shard-00000.npy, .ids and journal.jsonl
"""

import logging
import os
import socket
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import ray
from fsspec.core import url_to_fs
from numpy.typing import NDArray
from ray.data import ActorPoolStrategy
from ray.exceptions import RayError

from core import documents
from core.documents import DocumentReader, DocumentWriter
from core.errors import CareError, ProviderError
from core.shards import ShardRecord, ids_path, vectors_path, whole_shards, write_shard
from core.text import document_text
from core.types import Document, Encoder, EncoderSpec, Encoding, FloatArray
from indexer.corpus import Place
from indexer.encoding import (
    EncodingSummary,
    Reuse,
    check_refused,
    encode_corpus,
    refused_texts,
)
from indexer.progress import progress_bar
from indexer.staging import stage, unique_text_rows

LOCAL = "local"

# Workers that may die over one shard before the build ends.
_ATTEMPTS = 3
_TEXTS, _ATTEMPTS_FILE, _VECTORS = "texts", "attempts", "vectors"
# Nothing but the numbers of shards passes through it.
_OBJECT_STORE_BYTES = 200 * 2**20
_STARTS = 3
_CONNECT_SECONDS = 10

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RayEngine:
    """Encodes a staged corpus as `encode_corpus` does, on the actors of a Ray cluster.

    Batches depend on the shard alone, so the vectors are those of the local engine, however
    many actors there are, and either engine goes on where the other stopped. Ray restarts an
    actor that dies, and its shard is encoded again.

    Attributes:
        make_encoder: Makes the document encoder, once in each actor.
        address: The cluster's, or "local" for one that is started here and ends with the call.
        actors: How many encode at once.
        threads: Processors of an actor without GPUs.
        gpus: GPUs of an actor, if the cluster has any.
        storage: A folder or URL of fsspec that all machines reach, or None for the build folder.
    """

    make_encoder: Callable[[], Encoder]
    address: str = LOCAL
    actors: int = 1
    threads: int = 1
    gpus: int = 0
    storage: str | None = None

    def __call__(
        self,
        folder: Path,
        encoder: Encoder,
        *,
        shard_size: int,
        batch_size: int,
        progress: bool,
        reuse: Reuse | None = None,
        max_refused: int = 0,
    ) -> EncodingSummary:
        """Encodes the unique texts of a staged corpus into shards, from the first missing one.

        What actors had finished when an earlier run was killed is taken from the storage.

        Raises:
            CareError: If the encoder cannot be made, fails at too many texts or returns bad
                vectors, or worker after worker dies over a shard.
            ProviderError: If the cluster or the storage cannot be used.
        """
        started = time.perf_counter()
        corpus = _Corpus(folder, shard_size, reuse)
        storage = _Storage(self._storage_url(folder))
        records = whole_shards(folder)
        resumed = sum(record.rows for record in records)
        new_texts, encoder_seconds = 0, 0.0
        missing = range(len(records), corpus.shards)
        sent = {s: None for s in missing if storage.send(s, corpus.part(s).unknown)}
        worker = (self.make_encoder, storage.url, shard_size, batch_size, max_refused)
        with (
            progress_bar("encode", show=progress, total=corpus.texts, initial=resumed) as bar,
            closing(self._encode(list(sent), worker)) as encoded,
        ):
            for shard in missing:
                part = corpus.part(shard)
                texts = len(part.unknown)
                if shard in sent:
                    encoder_seconds += next(encoded) / self.actors
                    new_texts += texts
                else:
                    resumed += texts
                vectors = np.empty((len(part.documents), encoder.spec.dimension), dtype=np.float32)
                if part.found is not None:
                    vectors[part.known] = part.found
                ids = [document.id for document in part.documents]
                tokens = truncated = 0
                refused: dict[int, str] = {}
                if texts:
                    made, vectors[~part.known] = storage.fetch(shard)
                    tokens, truncated = made.tokens, made.truncated
                    rows = np.flatnonzero(~part.known)
                    refused = {int(rows[row]): reason for row, reason in made.refused.items()}
                    check_refused(records, ids, refused, max_refused)
                records.append(
                    write_shard(
                        folder,
                        shard,
                        vectors,
                        ids,
                        tokens=tokens,
                        truncated=truncated,
                        reused=len(part.documents) - texts,
                        refused=refused,
                    )
                )
                storage.remove(shard)
                bar.update(len(part.documents))
        storage.remove()
        return EncodingSummary(
            texts=corpus.texts,
            new_texts=new_texts,
            resumed_texts=resumed,
            reused_texts=sum(record.reused for record in records),
            tokens=sum(record.tokens for record in records),
            truncated=sum(record.truncated for record in records),
            seconds=time.perf_counter() - started,
            encoder_seconds=encoder_seconds,
            refused=refused_texts(records, shard_size),
        )

    def _storage_url(self, folder: Path) -> str:
        if self.storage is None:
            return str(folder.resolve() / "ray")
        root = self.storage if "://" in self.storage else str(Path(self.storage).resolve())
        return f"{root.rstrip('/')}/{folder.parent.name}/{folder.name}"

    def _encode(self, shards: Sequence[int], worker: tuple[Any, ...]) -> Generator[float]:
        """Yields the seconds that the encoder took for each shard, in order."""
        if not shards:
            return
        with connected(self.address, self.actors * self.threads):
            gpus = self.gpus if ray.cluster_resources().get("GPU") else 0
            dataset = ray.data.from_items(
                [{"shard": shard} for shard in shards], override_num_blocks=len(shards)
            ).map_batches(
                _Worker,
                batch_size=1,
                fn_constructor_args=worker,
                # One shard in work and one that waits.
                compute=ActorPoolStrategy(
                    size=min(self.actors, len(shards)), max_tasks_in_flight_per_actor=2
                ),
                num_cpus=1 if gpus else self.threads,
                num_gpus=gpus,
            )
            dataset.context.enable_progress_bars = False
            # The journal counts whole shards up to the first gap.
            dataset.context.execution_options.preserve_order = True
            try:
                for row in dataset.iter_rows():
                    if row["error"]:
                        raise CareError(row["error"])
                    yield row["seconds"]
            except RayError as error:
                reason = str(error).strip().splitlines()[-1]
                raise ProviderError(f"Ray ended the encoding: {reason}") from error


class RemoteEncoder:
    """Stands for a document encoder that is loaded by actors alone; it encodes nothing itself."""

    def __init__(self, spec: EncoderSpec) -> None:
        self.spec = spec

    def encode(self, texts: Sequence[str]) -> Encoding:
        """Is never called: the engine encodes.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError


@contextmanager
def connected(address: str, processors: int) -> Generator[None]:
    """Connects to a cluster, or starts one that is as large as is asked for."""
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    alone = {
        "num_cpus": processors,
        "include_dashboard": False,
        "object_store_memory": _OBJECT_STORE_BYTES,
    }
    try:
        _check(address)
        _init(address, **(alone if address == LOCAL else {}))
    except (OSError, RuntimeError, ValueError) as error:
        raise ProviderError(f"no Ray cluster can be used at '{address}': {error}") from error
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    try:
        yield
    finally:
        ray.shutdown()


def _init(address: str, **settings: Any) -> None:
    """Starts Ray or connects to it; tries again where a node never came up.

    Now and then a node never registers with the control service that was started with it. Ray
    gives it up after 30 seconds, with an exception of no class of its own.
    """
    for attempt in range(1, _STARTS + 1):
        try:
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **settings)
            return
        except Exception as error:
            ray.shutdown()
            if type(error) is not Exception:
                raise
            if attempt == _STARTS:
                raise RuntimeError(str(error)) from error
            _log.warning("Ray's node did not come up: starting it again")


def _check(address: str) -> None:
    """Fails at once where nothing listens, which Ray goes on asking for many minutes."""
    host, _, port = address.rpartition("/")[2].rpartition(":")
    if port.isdecimal():
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()


@dataclass(frozen=True, slots=True)
class _Part:
    """The documents of a shard, which of their texts are known, and the vectors of those."""

    documents: list[Document]
    known: NDArray[np.bool_]
    found: FloatArray | None

    @property
    def unknown(self) -> list[Document]:
        return [self.documents[row] for row in np.flatnonzero(~self.known)]


class _Corpus:
    """The unique texts of a staged corpus, shard by shard."""

    def __init__(self, folder: Path, shard_size: int, reuse: Reuse | None) -> None:
        self._reader = DocumentReader(folder / documents.FILE_NAME)
        self._rows = unique_text_rows(folder)
        self._shard_size = shard_size
        self._reuse = reuse
        self.texts = len(self._rows)
        self.shards = -(-self.texts // shard_size)

    def part(self, shard: int) -> _Part:
        start = shard * self._shard_size
        rows = self._rows[start : start + self._shard_size]
        found = [self._reader[int(row)] for row in rows]
        if not self._reuse:
            return _Part(found, np.zeros(len(found), dtype=np.bool_), None)
        return _Part(found, *self._reuse([document_text(d.title, d.text) for d in found]))


class _Storage:
    """Shards on their way to workers and back, in a folder or object store.

    Args:
        url: A path, or a URL of fsspec.

    Raises:
        ProviderError: If nothing installed can reach it.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        try:
            # Others write here too: what was listed before says nothing.
            self._files, self._root = url_to_fs(url, use_listings_cache=False)
            self._files.makedirs(self._root, exist_ok=True)
        except Exception as error:  # each file system raises its own
            raise ProviderError(f"'{url}' cannot be used as storage: {error}") from error

    def send(self, shard: int, unknown: Sequence[Document]) -> bool:
        """Puts documents where a worker finds them, unless their vectors are there already.

        Returns:
            Whether a worker is needed.
        """
        if not unknown or self._is_encoded(shard, unknown):
            return False
        self._files.makedirs(self._path(shard, _TEXTS), exist_ok=True)
        with TemporaryDirectory() as temporary:
            path = Path(temporary) / documents.FILE_NAME
            with DocumentWriter(path) as writer:
                for document in unknown:
                    writer.write(Document(document.id, document.text, document.title))
            self._put(shard, _TEXTS, [path])
        self._files.pipe_file(self._path(shard, _ATTEMPTS_FILE), b"0")
        return True

    def begin(self, shard: int, folder: Path) -> DocumentReader:
        """Fetches the documents of a shard for a worker.

        Raises:
            CareError: If too many workers have begun with them and none came to an end.
        """
        attempts = int(self._files.cat_file(self._path(shard, _ATTEMPTS_FILE)))
        if attempts == _ATTEMPTS:
            raise CareError(
                f"{attempts} workers died one after the other over shard {shard}: Ray's logs say "
                "why; too little memory for a batch is the most common cause"
            )
        self._files.pipe_file(self._path(shard, _ATTEMPTS_FILE), b"%d" % (attempts + 1))
        self._get(shard, _TEXTS, folder)
        return DocumentReader(folder / documents.FILE_NAME)

    def finish(self, shard: int, files: Iterable[Path]) -> None:
        """Puts what a worker has made where the driver finds it."""
        self._files.makedirs(self._path(shard, _VECTORS), exist_ok=True)
        self._put(shard, _VECTORS, files)

    def fetch(self, shard: int) -> tuple[ShardRecord, FloatArray]:
        """Returns what a worker has made.

        Raises:
            ProviderError: If it is not whole.
        """
        with TemporaryDirectory() as temporary:
            folder = Path(temporary)
            self._get(shard, _VECTORS, folder)
            if not (made := whole_shards(folder)):
                raise ProviderError(f"{self._path(shard, _VECTORS)} is damaged")
            return made[0], np.load(vectors_path(folder, 0))

    def remove(self, shard: int | None = None) -> None:
        """Deletes a shard, or all that is left."""
        path = self._root if shard is None else self._path(shard)
        if self._files.exists(path):
            self._files.rm(path, recursive=True)

    def _is_encoded(self, shard: int, unknown: Sequence[Document]) -> bool:
        with TemporaryDirectory() as temporary:
            folder = Path(temporary)
            try:
                self._get(shard, _VECTORS, folder)
            except FileNotFoundError:
                return False
            ids = "".join(f"{document.id}\n" for document in unknown)
            return bool(whole_shards(folder)) and ids_path(folder, 0).read_text("utf-8") == ids

    def _put(self, shard: int, part: str, files: Iterable[Path]) -> None:
        for file in files:
            self._files.put_file(str(file), self._path(shard, part, file.name))

    def _get(self, shard: int, part: str, folder: Path) -> None:
        for path in self._files.ls(self._path(shard, part), detail=False):
            self._files.get_file(path, str(folder / PurePosixPath(path).name))

    def _path(self, shard: int, *parts: str) -> str:
        return "/".join((self._root, f"{shard:05d}", *parts))


class _Worker:
    """What an actor runs: the local engine, on one shard after the other."""

    def __init__(
        self,
        make_encoder: Callable[[], Encoder],
        url: str,
        shard_size: int,
        batch_size: int,
        max_refused: int,
    ) -> None:
        self._make_encoder = make_encoder
        self._url = url
        self._shard_size = shard_size
        self._batch_size = batch_size
        self._max_refused = max_refused
        self._encoder: Encoder | None = None

    def __call__(self, block: dict[str, NDArray[np.int64]]) -> dict[str, list[Any]]:
        """Encodes a shard; an error is returned, which Ray would wrap in its own."""
        shard = int(block["shard"][0])
        seconds, message = 0.0, ""
        try:
            seconds = self._encode(shard)
        except CareError as error:
            message = str(error)
        except Exception as error:  # the boundary of the process
            _log.exception("shard %d", shard)
            message = f"the encoder failed on shard {shard} with {type(error).__name__}: {error}"
        return {"shard": [shard], "seconds": [seconds], "error": [message]}

    def _encode(self, shard: int) -> float:
        with TemporaryDirectory() as temporary:
            folder = Path(temporary)
            storage = _Storage(self._url)
            reader = storage.begin(shard, folder)
            # Here and not when the actor starts: a worker that dies of it counts as an attempt.
            self._encoder = self._encoder or self._make_encoder()
            corpus = folder / "corpus"
            corpus.mkdir()
            stage(
                [],
                "",
                corpus,
                max_reject_rate=0,
                progress=False,
                cut=((Place("", row), [document]) for row, document in enumerate(reader)),
            )
            staged = set(corpus.iterdir())
            summary = encode_corpus(
                corpus,
                self._encoder,
                shard_size=self._shard_size,
                batch_size=self._batch_size,
                progress=False,
                max_refused=self._max_refused,
            )
            storage.finish(shard, sorted(set(corpus.iterdir()) - staged))
        return summary.encoder_seconds
