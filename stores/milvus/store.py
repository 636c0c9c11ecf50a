"""The store of versions in Milvus: builds, opens, activates and drops their collections."""

import json
import logging
import re
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from pymilvus import DataType, MilvusClient, MilvusException
from pyroaring import BitMap

from core import documents, filters
from core.breaker import UnavailableError
from core.errors import CareError, IndexVersionError
from core.files import write_text
from core.loopback import is_local
from core.manifest import FULL_TEXT, TABLES, TOKENS, Component, IndexManifest
from core.progress import progress_bar
from core.types import FloatArray, RowArray
from core.versions import CURRENT, IndexFolder, read_manifest
from stores.base import (
    Contents,
    NewVersion,
    SearchChoice,
    SegmentText,
    StoreError,
    VectorStore,
    check_vectors,
)
from stores.lexical import LexicalIndex, full_text_component
from stores.milvus import names
from stores.milvus.collection import MILVUS_ERRORS, STRONG, Collection, Guard, error_name
from stores.milvus.full_text import JoinedFullText, MilvusFullText
from stores.milvus.names import COLLECTION, LABELS, MAX_LABELS, METRIC, ROW, VECTOR, VERSIONS
from stores.milvus.segment import MilvusDocuments, MilvusFilters, MilvusTokenRows, check_count
from stores.milvus.tables import batches, index_scalars, write_tables
from stores.milvus.vectors import MilvusVectors, search_many
from stores.milvus.versions import (
    KEY,
    NAME,
    PART,
    PART_FIELDS,
    PARTS,
    TEXT,
    Head,
    create_versions,
    folder_parts,
    remove_passing,
    write_fetched,
)
from stores.recall import Parameters, choose_parameters
from stores.segments import RowMap
from stores.term_list import USED, read_terms
from stores.token_vectors import TokenVectors, token_component, token_vector_spec

# Time-out of inserting a batch, flushing, and loading a collection; indexing has no time-out [s].
_LONG_TIMEOUT = 600.0
# Milvus rejects messages of more than 64 MB.
_INSERT_BYTES = 16 << 20
_INSERT_ROWS = 4096
# Parts of files that are read at once, 13 MB at most, and the time-out of writing some of 8 MB [s].
_READ_PARTS, _PARTS_TIMEOUT = 200, 20.0
# Rows that are kept where an index is written, because writes read the same ones several times.
_KEPT_ROWS = 4096
# Of the tables of a version, and the setting that has the mean number of terms of a row.
_FORMAT = 1
_MEAN = "mean_terms"
# Calls wait for a connection up to their time-out. By default the client retries with waits that
# exceed the time-out, and gRPC waits up to minutes before it reconnects.
_GRPC_OPTIONS = {
    "grpc.service_config": json.dumps({"methodConfig": [{"name": [{}], "waitForReady": True}]}),
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.max_reconnect_backoff_ms": 1000,
}
# On this machine no proxy is used, and no pings are sent: a connection to it cannot die unnoticed,
# and milvus-lite closes one that pings every 10 s, as the client does by default. Servers allow it.
_LOCAL_GRPC_OPTIONS = {"grpc.enable_http_proxy": 0, "grpc.keepalive_time_ms": 2**31 - 1}
_ADDRESS = re.compile(r"\S+://\S+|[\w.-]+:\d{2,5}\b")


class MilvusStore(VectorStore):
    """Stores each version in collections, of which the head of an index names the active one.

    For the arguments see `stores.registry.MilvusAddress`.

    Raises:
        StoreError: If Milvus does not respond.
    """

    def __init__(self, uri: str, token: str, timeout: float) -> None:
        # pymilvus logs each error that it raises with a traceback and the address.
        logging.getLogger("pymilvus").setLevel(logging.CRITICAL)
        with _milvus_request("connect"):
            self._client = MilvusClient(
                uri=uri,
                token=token,
                timeout=timeout,
                dedicated=True,
                grpc_options=_GRPC_OPTIONS | (_LOCAL_GRPC_OPTIONS if is_local(uri) else {}),
            )
        # After a broken connection the client would reconnect once per failed call, sequentially,
        # with a time-out for each; gRPC reconnects automatically.
        del self._client._handler._on_rpc_error
        self._timeout = timeout
        self._guard = Guard()
        self._process = uuid.uuid4().hex
        self._writes: set[str] = set()  # indexes that this process writes
        self._put: set[str] = set()  # names of folders whose parts Milvus has

    def active_version(self, index: IndexFolder) -> str:
        """Returns the version in the head of an index.

        Folders of the version that the index does not have are made, with manifest, term list and
        segments that were written.
        """
        head = self._head(index.name)
        if head is None:
            message = f"Milvus has no index '{index.name}', or only its vectors, as an earlier "
            message += "release wrote them: build the index with care index --store milvus"
            raise IndexVersionError(message, code="no_active_version", index=index.name)
        version = head.version
        needed = dict.fromkeys([*head.folders, version])
        gone = [name for name in needed if not index.version(name).exists()]
        for name in gone:
            self._fetch(index, name, passing=name != next(iter(needed)))
        has_current = (index.path / CURRENT).exists()
        if (gone or not has_current) and index.version(version).exists():
            write_text(index.path / CURRENT, version + "\n")
            remove_passing(index, needed)
        return version

    def claim(self, index: IndexFolder) -> None:
        """Names this process in the head, which others then find there when they write.

        It does so once, so that of two processes only the last one writes. What a killed process
        has left of versions that it did not activate is deleted.
        """
        if index.name in self._writes:
            return
        self.active_version(index)
        head = self._head(index.name)
        assert head
        self._move(index.name, replace(head, writer=self._process))
        self._writes.add(index.name)
        left = {entity[NAME] for entity in self._versions(f"{PART} == 0", [NAME])}
        needed = {names.collection_name(index.name, one) for one in (*head.folders, head.version)}
        with _milvus_request("delete what a killed process has left"):
            for name in left - needed:
                if (
                    names.index_of(name) == index.name
                    and not index.version(names.version_of(name)).exists()
                    and not self._client.has_collection(name, timeout=self._timeout)
                ):
                    self._delete_parts(name)

    def build(self, new: NewVersion) -> SearchChoice:
        """Creates the collection of a new version, inserts its vectors, indexes and loads it.

        The name of the collection is written to the folder before the collection is created, so
        that the collection of a killed build can be found and dropped.

        Raises:
            CareError: If a request to Milvus fails, or a document has too many metadata values.
        """
        collection = names.collection_name(new.index, new.version)
        write_text(new.folder / COLLECTION, f"{collection}\n")
        offsets, labels = new.filters.labels_of_rows()
        if (most := int(np.diff(offsets).max())) > MAX_LABELS:
            row = int(np.diff(offsets).argmax())
            raise CareError(
                f"row {row} has {most:,} metadata values for filters; the maximum in Milvus is "
                f"{MAX_LABELS:,}: remove some, or use --store faiss",
                code="too_many_values",
                row=row,
                count=most,
            )
        with _milvus_request("create a collection"):
            self._client.create_collection(
                collection, schema=_schema(new.vectors.dimension), timeout=self._timeout
            )
        size = max(1, min(_INSERT_ROWS, _INSERT_BYTES // (4 * new.vectors.dimension)))
        with (
            _milvus_request("insert the vectors"),
            progress_bar("index", show=new.progress, total=len(new.vectors)) as bar,
        ):
            for start, chunk in new.vectors.chunks(size):
                rows = [
                    {ROW: row, VECTOR: vector, LABELS: labels[offsets[row] : offsets[row + 1]]}
                    for row, vector in enumerate(chunk, start)
                ]
                self._client.insert(collection, rows, timeout=_LONG_TIMEOUT)
                bar.update(len(chunk))
            self._client.flush(collection, timeout=_LONG_TIMEOUT)
        self._index(collection, new.factory)

        def search(queries: FloatArray, k: int, parameters: Parameters) -> RowArray:
            with _milvus_request("search"):
                return search_many(self._client, collection, queries, k, parameters)

        by_cost = names.parameters_by_cost(new.factory)
        hint = "a factory with more links"
        return choose_parameters(search, by_cost, new.vectors, new.queries, new.recall, hint)

    def fetch(self, root: Path) -> None:
        """Makes the folders of the active versions that only Milvus has, below `root`.

        An index that is no longer in Milvus loses its `CURRENT`, without which it is not served.
        """
        # An index that has a folder is followed by those who have it open.
        known = {path.parent.name for path in root.glob(f"[!.]*/{CURRENT}")}
        heads = self._versions(f"{PARTS} == 0", [NAME])
        there = {names.index_of_head(entity[NAME]) for entity in heads}
        for name in there - known:
            with suppress(IndexVersionError):  # it was deleted meanwhile
                self.active_version(IndexFolder(root, name))
        for name in known - there:
            with suppress(CareError):  # its version cannot be read
                index = IndexFolder(root, name)
                manifest = read_manifest(index.version(index.active()))
                if not index.path.is_symlink() and TABLES in manifest.components:
                    (index.path / CURRENT).unlink(missing_ok=True)

    def write_contents(self, new: NewVersion) -> dict[str, Component]:
        """Writes the tables of a version, and removes the files whose content they have.

        So the folder is the same on each machine, and segments can be added to it anywhere.
        """
        collection = names.collection_name(new.index, new.version)
        with _milvus_request("write the documents"):
            terms, mean = write_tables(self._client, collection, new)
        size = (new.folder / documents.FILE_NAME).stat().st_size
        for name in (documents.FILE_NAME, filters.FILE_NAME):
            (new.folder / name).unlink()
        settings = {"terms": terms, _MEAN: mean, "document_bytes": size // len(new.documents)}
        found = {TABLES: Component(format=_FORMAT, settings=settings)}
        if new.full_text:
            found[FULL_TEXT] = full_text_component({})
        if new.token_spec:
            found[TOKENS] = token_component(new.token_spec, {})
        return found

    def open(self, folder: Path, manifest: IndexManifest) -> MilvusVectors:
        """Loads the collection of a version, if necessary."""
        collection = names.read_collection(folder) or ""
        opened = self._open(collection)
        with _milvus_request("open a collection"):
            fields = self._client.describe_collection(collection, timeout=self._timeout)["fields"]
        dimension = next(int(f["params"]["dim"]) for f in fields if f["name"] == VECTOR)
        try:
            vectors = MilvusVectors(opened, manifest, dimension)
            check_vectors(vectors, manifest, f"'{collection}' in Milvus")
        except UnavailableError as error:
            raise StoreError("the search in Milvus failed or timed out") from error
        return vectors

    def open_contents(
        self, folder: Path, manifest: IndexManifest, *, full_text: bool = True
    ) -> Contents:
        collection, known = names.read_collection(folder), manifest.components.get(TABLES)
        if collection is None:
            message = f"{folder} is not in Milvus: unset CARE_STORE"
            raise IndexVersionError(message, code="wrong_store", path=folder)
        if known is None or known.format != _FORMAT:
            reason = "is in Milvus as another release wrote it: build the index again with care "
            reason += "index --store milvus"
            raise IndexVersionError.at(folder, reason, "unreadable_version")
        rows, terms, values = map(self._open, names.table_names(collection))
        fields, count = manifest.filter_fields, manifest.count
        text = tokens = None
        try:
            check_count(rows, count, manifest)
            check_count(terms, known.settings["terms"], manifest)
            check_count(values, sum(fields.values()), manifest)
            by_value = MilvusFilters(rows, values, fields, count)
            by_value.frequent_values()
        except UnavailableError as error:
            raise StoreError("a request to Milvus failed or timed out") from error
        if FULL_TEXT in manifest.components:
            given = read_terms(folder, manifest, USED)
            text = MilvusFullText(rows, terms, count, given, known.settings[_MEAN])
        if spec := token_vector_spec(manifest):
            tokens = TokenVectors(MilvusTokenRows(rows), spec)
        chunked = manifest.chunking is not None
        kept = _KEPT_ROWS if manifest.name in self._writes else 0
        read = MilvusDocuments(rows, count, chunked=chunked, kept=kept)
        return Contents(read, by_value, text, tokens)

    def _open(self, collection: str) -> Collection:
        with _milvus_request("open a collection"):
            if not self._client.has_collection(collection, timeout=self._timeout):
                raise IndexVersionError(
                    f"Milvus has no collection '{collection}', which the version needs: build the "
                    "index again",
                    code="vectors_missing",
                    collection=collection,
                )
            self._client.load_collection(collection, timeout=_LONG_TIMEOUT)
        return Collection(self._client, collection, self._timeout, self._guard)

    def activate(self, name: str, folder: Path) -> None:
        """Writes the files of a version, for services without files, and moves the head to it.

        Raises:
            CareError: `other_writer`, if this process writes the index and another one does too.
        """
        manifest = read_manifest(folder)
        self._own_head(name)
        segments = [one.folder for one in manifest.segments] or [folder.name]
        for one in dict.fromkeys([*segments, folder.name]):
            self._put_folder(name, folder.with_name(one))
        head = self._own_head(name)
        self._move(name, Head(folder.name, tuple(segments), head.writer if head else ""))

    def is_active(self, folder: Path) -> bool:
        """Returns whether the head of an index needs a version."""
        head = self._head(folder.absolute().parent.name)
        return head is not None and folder.name in (head.version, *head.folders)

    def drop(self, folder: Path) -> None:
        """Drops the collections of a version, as far as they exist, and its files."""
        collection = names.read_collection(folder) or ""
        with _milvus_request("drop a collection"):
            for one in (*names.table_names(collection), collection):
                if self._client.has_collection(one, timeout=self._timeout):
                    self._drop(one)
            if self._client.has_collection(VERSIONS, timeout=self._timeout):
                self._client.load_collection(VERSIONS, timeout=_LONG_TIMEOUT)
                self._delete_parts(collection)

    def delete(self, index: str) -> None:
        """Deletes the collections and files of an index, and at last its head.

        So what a killed process leaves can be deleted again.
        """
        parts = {entity[NAME] for entity in self._versions(f"{PART} == 0", [NAME])}
        with _milvus_request("delete an index"):
            for one in self._client.list_collections(timeout=self._timeout):
                if names.index_of(one) == index:
                    self._drop(one)
            for name in parts:
                if names.index_of(name) == index:
                    self._delete_parts(name)
            if self._client.has_collection(VERSIONS, timeout=self._timeout):
                self._delete_parts(names.head_name(index))
        self._writes.discard(index)

    def _drop(self, collection: str) -> None:
        # An earlier release gave it an alias, without which it can be dropped.
        for alias in self._client.list_aliases(collection, timeout=self._timeout)["aliases"]:
            self._client.drop_alias(alias, timeout=self._timeout)
        self._client.drop_collection(collection, timeout=self._timeout)

    def _delete_parts(self, name: str) -> None:
        self._client.delete(VERSIONS, filter=f'{NAME} == "{name}"', timeout=self._timeout)
        self._put.discard(name)

    def join_full_text(
        self, folder: Path, segments: Sequence[SegmentText], deleted: BitMap
    ) -> LexicalIndex:
        base = segments[0].opened
        assert isinstance(base, MilvusFullText)
        rows = RowMap([one.manifest.count for one in segments], deleted)
        others = [one.documents for one in segments[1:]]
        return JoinedFullText(base, others, rows.first[1:].tolist(), rows.deleted)

    def _put_folder(self, index: str, folder: Path) -> None:
        """Writes the files of a folder to the collection of versions, unless it has them.

        The folder first gets the name under which Milvus has them, with which they are deleted.
        """
        name = names.collection_name(index, folder.name)
        if name in self._put:
            return
        if not (folder / COLLECTION).exists():
            write_text(folder / COLLECTION, f"{name}\n")
        with _milvus_request("write the manifest"):
            if not self._client.has_collection(VERSIONS, timeout=self._timeout):
                create_versions(self._client)
        own = f'{NAME} == "{name}"'
        there = self._versions(own, [PARTS])
        if not there or len(there) != there[0][PARTS]:
            parts = folder_parts(name, folder)
            with _milvus_request("write the manifest"):
                if there:
                    self._delete_parts(name)
                for batch in batches(parts):
                    self._client.insert(VERSIONS, batch, timeout=_PARTS_TIMEOUT)
            # A part of a request can fail without an error.
            if (count := len(self._versions(own, [PARTS]))) != len(parts):
                message = f"Milvus has {count} of {len(parts)} parts of version {folder.name}: "
                raise StoreError(f"{message}try again", version=folder.name)
        self._put.add(name)

    def _fetch(self, index: IndexFolder, version: str, *, passing: bool) -> None:
        """Makes a folder of a version; none if Milvus has no files of it."""
        name = names.collection_name(index.name, version)
        first = self._versions(f'{NAME} == "{name}" and {PART} == 0', PART_FIELDS)
        found = list(first)
        for start in range(1, first[0][PARTS] if first else 0, _READ_PARTS):
            window = f"{PART} >= {start} and {PART} < {start + _READ_PARTS}"
            found += self._versions(f'{NAME} == "{name}" and {window}', PART_FIELDS)
        if found:
            write_fetched(index, version, found, passing=passing)

    def _head(self, index: str) -> Head | None:
        """Returns the head of an index, as it is now."""
        found = self._versions(f'{KEY} == "{names.head_name(index)}"', [TEXT])
        return Head.of(found[0][TEXT]) if found else None

    def _own_head(self, index: str) -> Head | None:
        """Returns the head of an index; CareError if this and another process write it."""
        head = self._head(index)
        if head and index in self._writes and head.writer != self._process:
            message = f"another service writes index '{index}' in Milvus, and only one can: send "
            message += "writes to that one, or restart this service, which then takes its place"
            raise CareError(message, code="other_writer", index=index)
        return head

    def _move(self, index: str, head: Head) -> None:
        """Replaces the head of an index; after a StoreError it is not known whether it is."""
        with _milvus_request("move the head"):
            self._client.upsert(VERSIONS, [head.row(index)], timeout=self._timeout)
        if self._head(index) != head:
            message = f"another process has changed index '{index}' in Milvus at the same time: "
            raise StoreError(f"{message}try again", index=index)

    def _versions(self, condition: str, fields: Sequence[str]) -> list[dict[str, Any]]:
        """Returns fields of the rows of the collection of versions."""
        with _milvus_request("read the manifest"):
            if not self._client.has_collection(VERSIONS, timeout=self._timeout):
                return []
            self._client.load_collection(VERSIONS, timeout=_LONG_TIMEOUT)
            found: list[dict[str, Any]] = self._client.query(
                VERSIONS,
                filter=condition,
                output_fields=list(fields),
                consistency_level=STRONG,
                timeout=self._timeout,
            )
        return found

    def _index(self, collection: str, factory: str) -> None:
        kind, parameters = names.index_parameters(factory)
        with _milvus_request("index the vectors"):
            indexes = self._client.prepare_index_params()
            indexes.add_index(VECTOR, index_type=kind, metric_type=METRIC, params=parameters)
            self._client.create_index(collection, indexes)
            index_scalars(self._client, collection, [LABELS])
            self._client.load_collection(collection)


def _schema(dimension: int) -> object:
    schema = MilvusClient.create_schema(auto_id=False, enable_dynamic_field=False)
    schema.add_field(ROW, DataType.INT64, is_primary=True)
    schema.add_field(VECTOR, DataType.FLOAT_VECTOR, dim=dimension)
    schema.add_field(LABELS, DataType.ARRAY, element_type=DataType.INT64, max_capacity=MAX_LABELS)
    return schema


@contextmanager
def _milvus_request(action: str) -> Iterator[None]:
    """Turns errors of the client into a StoreError without addresses, which can have passwords."""
    try:
        yield
    except MILVUS_ERRORS as error:
        reason = error.message if isinstance(error, MilvusException) else error_name(error)
        raise StoreError(
            f"Milvus: the request to {action} failed: {_ADDRESS.sub('…', reason)}", request=action
        ) from error
