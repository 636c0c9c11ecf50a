"""The store of Milvus collections: builds, opens, activates and drops them."""

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
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
from stores.milvus import names
from stores.milvus.collection import MILVUS_ERRORS, STRONG, Collection, Guard, error_name
from stores.milvus.names import COLLECTION, LABELS, MAX_LABELS, METRIC, ROW, VECTOR, VERSIONS
from stores.milvus.segment import (
    MilvusDocuments,
    MilvusFilters,
    MilvusFullText,
    MilvusTokenRows,
    check_count,
)
from stores.milvus.tables import index_scalars, write_tables
from stores.milvus.vectors import MilvusVectors, search_many
from stores.milvus.versions import (
    NAME,
    PART,
    PART_FIELDS,
    create_versions,
    version_parts,
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
# Of the tables of a whole version.
_FORMAT = 1
# Calls wait for a connection up to their time-out. By default the client retries with waits that
# exceed the time-out, and gRPC waits up to minutes before it reconnects.
_GRPC_OPTIONS = {
    "grpc.service_config": json.dumps({"methodConfig": [{"name": [{}], "waitForReady": True}]}),
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.max_reconnect_backoff_ms": 1000,
}
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
                grpc_options=_GRPC_OPTIONS | {"grpc.enable_http_proxy": int(not is_local(uri))},
            )
        # After a broken connection the client would reconnect once per failed call, sequentially,
        # with a time-out for each; gRPC reconnects automatically.
        del self._client._handler._on_rpc_error
        self._timeout = timeout
        self._guard = Guard()

    def active_version(self, index: IndexFolder) -> str:
        """Returns the version to whose collection the alias points.

        If it is whole and the index has no folder of it, the folder is made, with manifest and
        term list.
        """
        alias = names.alias_name(index.name)
        with _milvus_request("describe the alias"):
            if not self._client.has_collection(alias, timeout=self._timeout):
                message = f"Milvus has no alias '{alias}': build the index with --store milvus"
                raise IndexVersionError(message, code="no_active_version", alias=alias)
            found = self._client.describe_alias(alias, timeout=self._timeout)
        version = names.version_of(found["collection_name"])
        if not index.version(version).exists():
            self._fetch(index, version)
        return version

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
            terms = write_tables(
                self._client,
                collection,
                documents,
                new.filters,
                full_text=FULL_TEXT in components,
                tokens=tokens,
                progress=new.progress,
            )
        size = (new.folder / FILE_NAME).stat().st_size
        settings = {"terms": terms, "document_bytes": size // len(documents)}
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
            text = MilvusFullText(rows, terms, count, read_terms(folder, manifest, USED))
        if spec := token_vector_spec(manifest):
            tokens = TokenVectors(MilvusTokenRows(rows), spec)
        chunked = manifest.chunking is not None
        return StoredRest(MilvusDocuments(rows, count, chunked=chunked), filters, text, tokens)

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
        """Points the alias of an index to the collection of a version, atomically.

        Before it, the manifest of a whole version is written to Milvus, for services without files.
        """
        collection, alias = names.read_collection(folder), names.alias_name(name)
        manifest = read_manifest(folder)
        if manifest.is_whole:
            self._put(folder, manifest)
        with _milvus_request("switch the alias"):
            if self._client.has_collection(alias, timeout=self._timeout):
                self._client.alter_alias(collection, alias, timeout=self._timeout)
            else:
                self._client.create_alias(collection, alias, timeout=self._timeout)

    def is_active(self, folder: Path) -> bool:
        """Returns whether an alias points to the collection of a version."""
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
                own = f'{NAME} == "{collection}"'
                self._client.delete(VERSIONS, filter=own, timeout=self._timeout)

    def _put(self, folder: Path, manifest: IndexManifest) -> None:
        """Writes manifest and small files of a whole version to the collection of versions."""
        collection = names.read_collection(folder) or ""
        parts = version_parts(collection, folder, manifest)
        with _milvus_request("write the manifest"):
            if not self._client.has_collection(VERSIONS, timeout=self._timeout):
                create_versions(self._client)
            self._client.upsert(VERSIONS, parts, timeout=self._timeout)

    def _fetch(self, index: IndexFolder, version: str) -> None:
        """Makes the folder of a whole version; none if Milvus has no manifest of it."""
        name = names.collection_name(index.name, version)
        if found := self._versions(f'{NAME} == "{name}"', PART_FIELDS):
            write_fetched(index, version, found)

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
