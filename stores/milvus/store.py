"""The store of Milvus collections: builds, opens, activates and drops them."""

import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from pymilvus import DataType, MilvusClient, MilvusException

from core.breaker import UnavailableError
from core.errors import CareError, IndexVersionError
from core.files import write_text
from core.loopback import is_local
from core.manifest import IndexManifest
from core.progress import progress_bar
from core.types import FloatArray, RowArray
from core.versions import IndexFolder
from stores.base import NewVectors, SearchChoice, StoreError, VectorStore, check_vectors
from stores.milvus import names
from stores.milvus.names import COLLECTION, LABELS, MAX_LABELS, METRIC, ROW, VECTOR
from stores.milvus.vectors import MILVUS_ERRORS, Guard, MilvusVectors, error_name, search_many
from stores.recall import Parameters, choose_parameters

# Time-out of inserting a batch, flushing, and loading a collection; indexing has no time-out [s].
_LONG_TIMEOUT = 600.0
# Milvus rejects messages of more than 64 MB.
_INSERT_BYTES = 16 << 20
_INSERT_ROWS = 4096
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
        """Returns the version to whose collection the alias points."""
        alias = names.alias_name(index.name)
        with _milvus_request("describe the alias"):
            if not self._client.has_collection(alias, timeout=self._timeout):
                message = f"Milvus has no alias '{alias}': build the index with --store milvus"
                raise IndexVersionError(message, code="no_active_version", alias=alias)
            found = self._client.describe_alias(alias, timeout=self._timeout)
        return names.version_of(found["collection_name"])

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

    def open(self, folder: Path, manifest: IndexManifest) -> MilvusVectors:
        """Loads the collection of a version, if necessary."""
        collection = names.read_collection(folder)
        if collection is None:
            message = f"the vectors of {folder} are not in Milvus: unset CARE_STORE"
            raise IndexVersionError(message, code="wrong_store", path=folder)
        with _milvus_request("open a collection"):
            if not self._client.has_collection(collection, timeout=self._timeout):
                raise IndexVersionError(
                    f"the vectors of {folder} are missing: Milvus has no collection "
                    f"'{collection}'; build the index again",
                    code="vectors_missing",
                    collection=collection,
                )
            self._client.load_collection(collection, timeout=_LONG_TIMEOUT)
            vectors = MilvusVectors(self._client, collection, manifest, self._timeout, self._guard)
        try:
            check_vectors(vectors, manifest, f"'{collection}' in Milvus")
        except UnavailableError as error:
            raise StoreError("the search in Milvus failed or timed out") from error
        return vectors

    def activate(self, name: str, folder: Path) -> None:
        """Points the alias of an index to the collection of a version, atomically."""
        collection, alias = names.read_collection(folder), names.alias_name(name)
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
            if self._client.has_collection(collection, timeout=self._timeout):
                self._client.drop_collection(collection, timeout=self._timeout)

    def _index(self, collection: str, factory: str) -> None:
        kind, parameters = names.index_parameters(factory)
        with _milvus_request("index the vectors"):
            indexes = self._client.prepare_index_params()
            indexes.add_index(VECTOR, index_type=kind, metric_type=METRIC, params=parameters)
            self._client.create_index(collection, indexes)
            try:
                indexes = self._client.prepare_index_params()
                indexes.add_index(LABELS, index_type="INVERTED")
                self._client.create_index(collection, indexes)
            except MilvusException:
                # milvus-lite does not index arrays; filters then scan them with the same result.
                pass
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
