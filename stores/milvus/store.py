"""The store of Milvus collections: builds, opens, activates and drops them."""

import json
import logging
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pymilvus import DataType, MilvusClient, MilvusException

from core.breaker import UnavailableError
from core.documents import FILE_NAME, DocumentReader
from core.errors import CareError, IndexVersionError
from core.files import write_text
from core.loopback import is_local
from core.manifest import FULL_TEXT, TOKENS, WHOLE, Component, IndexManifest
from core.progress import progress_bar
from core.types import FloatArray, RowArray
from core.versions import CURRENT, IndexFolder, read_manifest
from stores.base import (
    NewVectors,
    SearchChoice,
    StoredRest,
    StoreError,
    VectorStore,
    check_vectors,
)
from stores.lexical import LexicalIndex
from stores.milvus import names
from stores.milvus.collection import MILVUS_ERRORS, STRONG, Collection, Guard, error_name
from stores.milvus.full_text import JoinedFullText, MilvusFullText
from stores.milvus.names import COLLECTION, LABELS, MAX_LABELS, MEAN, METRIC, ROW, VECTOR, VERSIONS
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
from stores.term_list import USED, read_terms
from stores.token_vectors import TokenVectors, open_token_vectors, token_vector_spec

# Time-out of inserting a batch, flushing, and loading a collection; indexing has no time-out [s].
_LONG_TIMEOUT = 600.0
# Milvus rejects messages of more than 64 MB.
_INSERT_BYTES = 16 << 20
_INSERT_ROWS = 4096
# Parts of files that are read at once, 13 MB at most, and the time-out of writing some of 8 MB [s].
_READ_PARTS, _PARTS_TIMEOUT = 200, 20.0
# Rows that are kept where an index is written, because writes read the same ones several times.
_KEPT_ROWS = 4096
# Of the tables of a whole version.
_FORMAT = 1
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
    """Stores the vectors of each version in a collection; an alias points to the active one.

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
        """Returns the version in the head of an index, else that of its alias.

        Folders of a whole version that the index does not have are made, with manifest, term list
        and segments that were written.
        """
        head = self._head(index.name)
        version = head.version if head else self._version_of_alias(index)
        needed = dict.fromkeys([*(head.folders if head else ()), version])
        if gone := [name for name in needed if not index.version(name).exists()]:
            for name in gone:
                self._fetch(index, name, passing=name != next(iter(needed)))
            if index.version(version).exists():
                write_text(index.path / CURRENT, version + "\n")
                remove_passing(index, needed)
        return version

    def _version_of_alias(self, index: IndexFolder) -> str:
        alias = names.alias_name(index.name)
        with _milvus_request("describe the alias"):
            if not self._client.has_collection(alias, timeout=self._timeout):
                message = f"Milvus has no alias '{alias}': build the index with --store milvus"
                raise IndexVersionError(message, code="no_active_version", alias=alias)
            found = self._client.describe_alias(alias, timeout=self._timeout)
        return names.version_of(found["collection_name"])

    def claim(self, index: IndexFolder) -> None:
        """Names this process in the head, which others then find there when they write.

        It does so once, so that of two processes only the last one writes. What a killed process
        has left of versions that it did not activate is deleted.
        """
        if index.name in self._writes:
            return
        version = self.active_version(index)
        head = self._head(index.name) or Head(version, (version,))
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

    def build(self, new: NewVectors) -> SearchChoice:
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
        for collection in {entity[NAME] for entity in self._versions(f"{PART} == 0", [NAME])}:
            index = names.index_of(collection)
            # An index that has a folder is followed by those who have it open.
            if index and not (root / index / CURRENT).exists():
                with suppress(IndexVersionError):  # none of its versions is active
                    self.active_version(IndexFolder(root, index))

    def write_rest(
        self, new: NewVectors, documents: DocumentReader, components: Mapping[str, Component]
    ) -> Component:
        collection = names.collection_name(new.index, new.version)
        tokens = open_token_vectors(new.folder, components.get(TOKENS), len(documents))
        with _milvus_request("write the documents"):
            terms, mean = write_tables(
                self._client,
                collection,
                documents,
                new.filters,
                full_text=FULL_TEXT in components,
                tokens=tokens,
                progress=new.progress,
            )
        size = (new.folder / FILE_NAME).stat().st_size
        settings = {"terms": terms, MEAN: mean, "document_bytes": size // len(documents)}
        return Component(format=_FORMAT, settings=settings)

    def open(self, folder: Path, manifest: IndexManifest) -> MilvusVectors:
        """Loads the collection of a version, if necessary."""
        collection = names.read_collection(folder)
        if collection is None:
            message = f"the vectors of {folder} are not in Milvus: unset CARE_STORE"
            raise IndexVersionError(message, code="wrong_store", path=folder)
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

    def open_rest(self, folder: Path, manifest: IndexManifest) -> StoredRest:
        whole = manifest.components[WHOLE]
        if whole.format != _FORMAT:
            reason = f"has format {whole.format} in Milvus instead of {_FORMAT}"
            raise IndexVersionError.at(
                folder, f"{reason}: build the index again", "unreadable_version"
            )
        tables = names.table_names(names.read_collection(folder) or "")
        rows, terms, values = map(self._open, tables)
        fields, count = manifest.filter_fields, manifest.count
        text = tokens = None
        try:
            check_count(rows, count, manifest)
            check_count(terms, whole.settings["terms"], manifest)
            check_count(values, sum(fields.values()), manifest)
            filters = MilvusFilters(rows, values, fields, count)
            filters.frequent_values()
        except UnavailableError as error:
            raise StoreError("a request to Milvus failed or timed out") from error
        if FULL_TEXT in manifest.components:
            given = read_terms(folder, manifest, USED)
            text = MilvusFullText(rows, terms, count, given, whole.settings.get(MEAN, 0.0))
        if spec := token_vector_spec(manifest):
            tokens = TokenVectors(MilvusTokenRows(rows), spec)
        chunked = manifest.chunking is not None
        kept = _KEPT_ROWS if manifest.name in self._writes else 0
        read = MilvusDocuments(rows, count, chunked=chunked, kept=kept)
        return StoredRest(read, filters, text, tokens)

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
        """Points the alias of an index to the collection of a base, then its head to the version.

        Before it, files of a whole version are written to Milvus, for services without files. Each
        step is atomic. The head counts, if there is one.

        Raises:
            CareError: `other_writer`, if this process writes the index and another one does too.
        """
        manifest = read_manifest(folder)
        head = self._own_head(name)
        segments = [one.folder for one in manifest.segments] or [folder.name]
        if manifest.is_whole:
            for one in dict.fromkeys([*segments, folder.name]):
                self._put_folder(name, folder.with_name(one))
            head = self._own_head(name)
        if head is None or head.folders[0] != segments[0]:
            collection = names.read_collection(folder.with_name(segments[0])) or ""
            self._point(names.alias_name(name), collection)
        if head or manifest.is_whole:
            self._move(name, Head(folder.name, tuple(segments), head.writer if head else ""))

    def _point(self, alias: str, collection: str) -> None:
        with _milvus_request("switch the alias"):
            if self._client.has_collection(alias, timeout=self._timeout):
                self._client.alter_alias(collection, alias, timeout=self._timeout)
            else:
                self._client.create_alias(collection, alias, timeout=self._timeout)

    def is_active(self, folder: Path) -> bool:
        """Returns whether the head of an index needs a version, or an alias its collection."""
        if head := self._head(folder.absolute().parent.name):
            return folder.name in (head.version, *head.folders)
        collection = names.read_collection(folder)
        with _milvus_request("list aliases"):
            if not self._client.has_collection(collection, timeout=self._timeout):
                return False
            return bool(self._client.list_aliases(collection, timeout=self._timeout)["aliases"])

    def drop(self, folder: Path) -> None:
        """Drops the collection of a version, if it exists."""
        collection = names.read_collection(folder)
        with _milvus_request("drop a collection"):
            for one in (*names.table_names(collection or ""), collection):
                if self._client.has_collection(one, timeout=self._timeout):
                    self._client.drop_collection(one, timeout=self._timeout)
            if self._client.has_collection(VERSIONS, timeout=self._timeout):
                self._client.load_collection(VERSIONS, timeout=_LONG_TIMEOUT)
                self._delete_parts(collection or "")

    def _delete_parts(self, name: str) -> None:
        self._client.delete(VERSIONS, filter=f'{NAME} == "{name}"', timeout=self._timeout)
        self._put.discard(name)

    def join_text(
        self,
        base: LexicalIndex,
        documents: Sequence[DocumentReader],
        firsts: Sequence[int],
        deleted: NDArray[np.bool_],
    ) -> LexicalIndex:
        assert isinstance(base, MilvusFullText)
        return JoinedFullText(base, documents, firsts, deleted)

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
        """Makes a folder of a whole version; none if Milvus has no files of it."""
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
        found = self._versions(f'{KEY} == "{names.alias_name(index)}"', [TEXT])
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
