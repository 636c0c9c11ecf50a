"""Vectors in Milvus: a collection for each version, and an alias to the active one."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import numpy as np
from pymilvus import DataType, MilvusClient, MilvusException

from core import filters
from core.errors import CareError, IndexVersionError
from core.files import write_text
from core.filters import FilterReader
from core.milvus import (
    COLLECTION,
    LABELS,
    MAX_LABELS,
    METRIC,
    ROW,
    VECTOR,
    collection_name,
    rows_expression,
    search_parameters,
)
from core.types import FloatArray, RowArray
from indexer.milvus_factory import index_parameters, parameters_by_cost
from indexer.progress import progress_bar
from indexer.recall import Parameters, SearchChoice, choose_parameters
from indexer.stores import NewVersion, StoredVectors

# Until a connection stands, or a small request is answered [s].
_TIMEOUT = 20.0
# Until Milvus has taken a batch, or all of them; indexing has no limit [s].
_WRITE_TIMEOUT = 600.0
# Milvus refuses messages of more than 64 MB.
_INSERT_BYTES = 16 << 20
_INSERT_ROWS = 4096
_TAKE_ROWS = 1024
# Whatever was written before is found.
_STRONG = "Strong"


class MilvusStore:
    """Writes, opens and drops collections.

    Args:
        uri: Where Milvus is.
        token: What it asks for, or empty.

    Raises:
        CareError: If it does not answer or refuses.
    """

    def __init__(self, uri: str, token: str) -> None:
        # It logs each error that it raises, with its traceback.
        logging.getLogger("pymilvus").setLevel(logging.CRITICAL)
        with _asking("connect"):
            self._client = MilvusClient(uri=uri, token=token, timeout=_TIMEOUT)

    def write(self, new: NewVersion) -> SearchChoice:
        """Fills the collection of a new version, indexes and loads it.

        The folder names the collection before there is one: whoever finds the folder after a
        kill can drop it.

        Raises:
            CareError: If Milvus fails, or a document has too many metadata values for it.
            IndexVersionError: If no search reaches the recall asked for.
        """
        name = collection_name(new.name, new.version)
        write_text(new.folder / COLLECTION, f"{name}\n")
        reader = FilterReader(new.folder / filters.FILE_NAME, new.filter_fields)
        places, labels = reader.labels_of_rows(len(new.vectors))
        if (most := int(np.diff(places).max())) > MAX_LABELS:
            raise CareError(
                f"row {int(np.diff(places).argmax())} has {most:,} metadata values to filter by; "
                f"Milvus takes {MAX_LABELS:,}"
            )
        with _asking("create a collection"):
            self._client.create_collection(
                name, schema=_schema(new.vectors.dimension), timeout=_TIMEOUT
            )
        size = max(1, min(_INSERT_ROWS, _INSERT_BYTES // (4 * new.vectors.dimension)))
        with (
            _asking("take the vectors"),
            progress_bar("index", show=new.progress, total=len(new.vectors)) as bar,
        ):
            for start, chunk in new.vectors.chunks(size):
                rows = [
                    {ROW: row, VECTOR: vector, LABELS: labels[places[row] : places[row + 1]]}
                    for row, vector in enumerate(chunk, start)
                ]
                self._client.insert(name, rows, timeout=_WRITE_TIMEOUT)
                bar.update(len(chunk))
            self._client.flush(name, timeout=_WRITE_TIMEOUT)
        self._index(name, new.factory)

        def search(queries: FloatArray, k: int, parameters: Parameters) -> RowArray:
            return _Collection(self._client, name).search(queries, k, parameters)[1]

        return choose_parameters(
            search,
            parameters_by_cost(new.factory),
            new.vectors,
            new.queries,
            new.recall,
            "a factory with more links",
        )

    def open(self, collection: str) -> StoredVectors:
        """Opens a collection and loads it, if it is not.

        Raises:
            CareError: If Milvus fails.
            IndexVersionError: If there is no such collection.
        """
        with _asking("open a collection"):
            if not self._client.has_collection(collection, timeout=_TIMEOUT):
                raise IndexVersionError(
                    f"Milvus has no collection '{collection}': the version's vectors are gone"
                )
            self._client.load_collection(collection)
        return _Collection(self._client, collection)

    def lead(self, alias: str, collection: str) -> None:
        """Lets an alias lead to a collection, in one step.

        Raises:
            CareError: If Milvus fails; the alias stays where it was.
        """
        with _asking("switch the alias"):
            if self._client.has_collection(alias, timeout=_TIMEOUT):
                self._client.alter_alias(collection, alias, timeout=_TIMEOUT)
            else:
                self._client.create_alias(collection, alias, timeout=_TIMEOUT)

    def has_alias(self, collection: str) -> bool:
        """Returns whether an alias leads to a collection.

        Raises:
            CareError: If Milvus fails.
        """
        with _asking("list aliases"):
            if not self._client.has_collection(collection, timeout=_TIMEOUT):
                return False
            return bool(self._client.list_aliases(collection, timeout=_TIMEOUT)["aliases"])

    def drop(self, collection: str) -> None:
        """Drops a collection, if there is one.

        Raises:
            CareError: If Milvus fails.
        """
        with _asking("drop a collection"):
            if self._client.has_collection(collection, timeout=_TIMEOUT):
                self._client.drop_collection(collection, timeout=_TIMEOUT)

    def _index(self, collection: str, factory: str) -> None:
        kind, parameters = index_parameters(factory)
        with _asking("index the vectors"):
            indexes = self._client.prepare_index_params()
            indexes.add_index(VECTOR, index_type=kind, metric_type=METRIC, params=parameters)
            self._client.create_index(collection, indexes)
            try:
                indexes = self._client.prepare_index_params()
                indexes.add_index(LABELS, index_type="INVERTED")
                self._client.create_index(collection, indexes)
            except MilvusException:
                # milvus-lite indexes no arrays: it reads them all, and finds the same.
                pass
            self._client.load_collection(collection)


class _Collection:
    def __init__(self, client: MilvusClient, name: str) -> None:
        self._client = client
        self._name = name

    @property
    def count(self) -> int:
        with _asking("count vectors"):
            (found,) = self._client.query(
                self._name,
                output_fields=["count(*)"],
                consistency_level=_STRONG,
                timeout=_TIMEOUT,
            )
        return int(found["count(*)"])

    @property
    def dimension(self) -> int:
        with _asking("describe a collection"):
            fields = self._client.describe_collection(self._name, timeout=_TIMEOUT)["fields"]
        return next(int(field["params"]["dim"]) for field in fields if field["name"] == VECTOR)

    def best_scores(self, queries: FloatArray) -> FloatArray:
        widest = parameters_by_cost("HNSW32")[-1]
        return self.search(queries, 1, widest)[0][:, 0]

    def search(
        self, queries: FloatArray, k: int, parameters: Parameters
    ) -> tuple[FloatArray, RowArray]:
        """Returns scores, float32 [q, k], and rows, int64 [q, k]; -1 where fewer are found."""
        with _asking("search"):
            results = self._client.search(
                self._name,
                data=list(queries),
                anns_field=VECTOR,
                limit=k,
                search_params=search_parameters(parameters, k),
                output_fields=[ROW],
                consistency_level=_STRONG,
                timeout=_WRITE_TIMEOUT,
            )
        scores = np.full((len(queries), k), -np.inf, np.float32)
        rows = np.full((len(queries), k), -1, np.int64)
        for i, hits in enumerate(results):
            for j, hit in enumerate(hits):
                scores[i, j], rows[i, j] = hit["distance"], hit[ROW]
        return scores, rows

    def take(self, rows: RowArray) -> FloatArray:
        vectors = np.empty((len(rows), self.dimension), np.float32)
        for start in range(0, len(rows), _TAKE_ROWS):
            part = rows[start : start + _TAKE_ROWS].tolist()
            with _asking("read vectors"):
                found = self._client.query(
                    self._name,
                    filter=rows_expression(part),
                    output_fields=[ROW, VECTOR],
                    consistency_level=_STRONG,
                    timeout=_WRITE_TIMEOUT,
                )
            by_row = {entity[ROW]: entity[VECTOR] for entity in found}
            if missing := [row for row in part if row not in by_row]:
                raise IndexVersionError(f"Milvus: '{self._name}' has no row {missing[0]}")
            vectors[start : start + len(part)] = [by_row[row] for row in part]
        return vectors


def _schema(dimension: int) -> object:
    schema = MilvusClient.create_schema(auto_id=False, enable_dynamic_field=False)
    schema.add_field(ROW, DataType.INT64, is_primary=True)
    schema.add_field(VECTOR, DataType.FLOAT_VECTOR, dim=dimension)
    schema.add_field(LABELS, DataType.ARRAY, element_type=DataType.INT64, max_capacity=MAX_LABELS)
    return schema


@contextmanager
def _asking(what: str) -> Iterator[None]:
    """Says in one sentence what Milvus did not do.

    Raises:
        CareError: In place of any error of its client.
    """
    try:
        yield
    except MilvusException as error:
        raise CareError(f"Milvus did not {what}: {error.message}") from error
    except grpc.RpcError as error:
        raise CareError(f"Milvus did not {what}: {error.code().name}") from error
