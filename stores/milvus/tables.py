"""What a version has in Milvus besides its vectors: the collections of its tables.

rows      documents or chunks by row, the labels of their filter values, and of their terms the
          number and the share of BM25; token vectors
terms     the terms of full text: number and number of rows
values    the filter values by label: field, value, number of rows

In conditions hashes stand for ids, terms and values, so that no text has to be quoted.
"""

import hashlib
import json
from array import array
from base64 import b64encode
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from pymilvus import DataType, MilvusClient, MilvusException

from core.analysis import terms
from core.documents import column_names, columns_of
from core.errors import CareError
from core.filter_table import encode_value, hash_value
from core.filters import FilterReader
from core.manifest import TOKENS
from core.progress import progress_bar
from core.rows import Rows, offsets_of
from core.scratch import scratch
from core.text import document_text
from core.types import Document
from stores.base import NewVersion
from stores.lexical import K1
from stores.milvus.collection import Entity
from stores.milvus.names import LABELS, MAX_BYTES, MAX_LABELS, METRIC, ROW, table_names

ID_KEY, PARENT_KEY, TERMS, NUMBERS = "id_key", "parent_key", "terms", "numbers"
LABEL, KEY, FIELD, VALUE, COUNT = "label", "value_key", "field", "value", "count"
NUMBER, IS_NUMBER, RANK = "number", "is_number", "rank"
TERM, TERM_KEY = "term", "term_key"
# A vector of one dimension where there is no other, because one is required.
NO_VECTOR = "none"

_B = 0.75
# The number of documents without terms, which no query has: an empty vector is refused.
_NO_TERM = 0
# Time-out of an insert, a flush and a load [s]; bytes and rows of an insert.
_TIMEOUT = 600.0
_INSERT_BYTES, _INSERT_ROWS = 8 << 20, 4096
# Bytes of a number in a request, about.
_NUMBER_BYTES = 16


def hash_of(text: str) -> int:
    """Returns 63 bits of a hash, because milvus-lite refuses negative numbers in conditions."""
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def value_key(field: str, value: Any) -> int:
    """Returns the hash of a filter value."""
    return hash_of(hash_value(field, value))


def write_tables(client: MilvusClient, collection: str, new: NewVersion) -> tuple[int, float]:
    """Writes the tables of the version whose vectors are in a collection.

    Returns:
        The number of terms, and how many a row has on average.

    Raises:
        CareError: `too_large_for_milvus`, if a field of a document has more bytes than Milvus
            takes.
        MilvusException, grpc.RpcError: If a request fails.
    """
    rows, terms_, values = table_names(collection)
    text = {TERMS: DataType.SPARSE_FLOAT_VECTOR, NUMBERS: DataType.ARRAY}
    create_table(
        client,
        rows,
        {ROW: DataType.INT64, ID_KEY: DataType.INT64, PARENT_KEY: DataType.INT64}
        | dict.fromkeys((*column_names(chunked=False), "parent"), DataType.VARCHAR)
        | {"chunk": DataType.INT64, "chunks": DataType.INT64, LABELS: DataType.ARRAY}
        | ({TOKENS: DataType.VARCHAR} if new.tokens is not None else {})
        | (text if new.full_text else {NO_VECTOR: DataType.FLOAT_VECTOR}),
    )
    known = _Terms.of(new) if new.full_text else None
    with progress_bar("milvus", show=new.progress, total=len(new.documents)) as bar:
        for batch in batches(_rows(new, known)):
            client.insert(rows, batch, timeout=_TIMEOUT)
            bar.update(len(batch))
    _load(client, rows, [ID_KEY, PARENT_KEY, LABELS, *([NUMBERS] if known else ())])
    number, float_ = DataType.INT64, DataType.FLOAT_VECTOR
    table = {
        TERM_KEY: number,
        TERM: DataType.VARCHAR,
        NUMBER: number,
        COUNT: number,
        NO_VECTOR: float_,
    }
    create_table(client, terms_, table)
    _insert(client, terms_, known.entities() if known else ())
    _load(client, terms_, [])
    own = {LABEL: number, KEY: number, FIELD: DataType.VARCHAR, VALUE: DataType.VARCHAR}
    own |= {NUMBER: DataType.DOUBLE, IS_NUMBER: DataType.BOOL, COUNT: number, RANK: number}
    create_table(client, values, own | {NO_VECTOR: float_})
    _insert(client, values, _values(new.filters))
    _load(client, values, [KEY, RANK])
    return (len(known.numbers), known.mean) if known else (0, 0.0)


def term_shares(document: Document, mean: float) -> dict[str, float]:
    """Returns what each term contributes to BM25 beside its idf, given the mean number of terms."""
    counts = _count_terms(document)
    norm = _norm(counts.total(), mean)
    return {term: n / (n + norm) for term, n in counts.items()}


def _count_terms(document: Document) -> Counter[str]:
    return Counter(terms(document_text(document.title, document.text)))


def _norm(length: int, mean: float) -> float:
    """Returns what BM25 adds to the count of a term in a row of some length."""
    return K1 * (1 - _B + _B * _stored_length(length) / (mean or 1.0))


@dataclass(frozen=True, slots=True)
class _Terms:
    """The terms of all documents, each of which is analysed once.

    Attributes:
        numbers: The number of each term, from 1 on.
        counts: How many rows have each term.
        rows: Of each row the numbers of its terms, and how often it has them, uint32 [terms, 2].
        mean: Mean number of terms of a row.
    """

    numbers: dict[str, int]
    counts: Counter[str]
    rows: Rows
    mean: float

    @classmethod
    def of(cls, new: NewVersion) -> Self:
        """Analyses the documents of a version; what they have is kept in a file on its disk."""
        numbers: dict[str, int] = {}
        counts: Counter[str] = Counter()
        lengths = array("i")
        total = 0
        with (
            scratch(new.folder, np.uint32) as file,
            progress_bar("text", show=new.progress, total=len(new.documents)) as bar,
        ):
            for document in new.documents:
                own = _count_terms(document)
                counts.update(own.keys())
                total += own.total()
                pairs = [(numbers.setdefault(t, len(numbers) + 1), n) for t, n in own.items()]
                file.append(np.array(pairs, np.uint32).tobytes())
                lengths.append(len(pairs))
                bar.update()
            rows = Rows(file.array().reshape(-1, 2), offsets_of(np.array(lengths)))
        return cls(numbers, counts, rows, total / len(new.documents))

    def shares(self, row: int) -> dict[int, float]:
        """Returns the shares of the terms of a row by their numbers."""
        own = self.rows[row].tolist()
        norm = _norm(sum(n for _, n in own), self.mean)
        return {number: n / (n + norm) for number, n in own} or {_NO_TERM: 1.0}

    def entities(self) -> Iterator[Entity]:
        for term, number in self.numbers.items():
            count = self.counts[term]
            yield {
                TERM_KEY: hash_of(term),
                TERM: term,
                NUMBER: number,
                COUNT: count,
                NO_VECTOR: [0.0],
            }


def _stored_length(length: int) -> int:
    """Returns the length of a document as Tantivy keeps it: from 40 on with four binary digits."""
    if length < 40:
        return length
    shift = (length - 24).bit_length() - 4
    return 24 + ((length - 24) >> shift << shift)


def _rows(new: NewVersion, known: _Terms | None) -> Iterator[Entity]:
    offsets, labels = new.filters.labels_of_rows()
    for row, document in enumerate(new.documents):
        entity = columns_of(document, chunked=True)
        entity["parent"] = parent = document.parent or ""
        if new.tokens is not None:
            entity[TOKENS] = b64encode(new.tokens.row(row).tobytes()).decode()
        _check_sizes(document.id, entity)
        entity |= {ROW: row, LABELS: labels[offsets[row] : offsets[row + 1]].tolist()}
        entity |= {ID_KEY: hash_of(document.id), PARENT_KEY: hash_of(parent)}
        if known:
            shares = known.shares(row)
            # No condition finds a row with more terms: a short query then has no bonus there.
            numbers = sorted(shares) if len(shares) <= MAX_LABELS else []
            entity |= {TERMS: shares, NUMBERS: numbers}
        else:
            entity[NO_VECTOR] = [0.0]
        yield entity


def _check_sizes(id_: str, entity: Mapping[str, Any]) -> None:
    for name, text in entity.items():
        if isinstance(text, str) and (size := len(text.encode())) > MAX_BYTES:
            message = f"document '{id_[:64]}': {name} takes {size:,} bytes and Milvus at most "
            message += f"{MAX_BYTES:,}: split it with --chunk-tokens, or use --store faiss"
            raise CareError(message, code="too_large_for_milvus", field=name, limit=MAX_BYTES)


def _values(filters: FilterReader) -> Iterator[Entity]:
    frequent = filters.frequent_values()
    ranks = {
        (field, encode_value(value)): rank
        for field, listed in frequent.items()
        for rank, (value, _) in enumerate(listed)
    }
    for label, (field, text, count) in enumerate(filters.values()):
        value = json.loads(text)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        entity = {LABEL: label, KEY: value_key(field, value), FIELD: field, VALUE: text}
        _check_sizes(f"value {label}", entity)
        entity |= {NUMBER: nearest_float(value) if is_number else 0.0, IS_NUMBER: is_number}
        yield entity | {COUNT: count, RANK: ranks.get((field, text), -1), NO_VECTOR: [0.0]}


def nearest_float(number: float) -> float:
    """Returns a number as a float; an integer beyond their range as the largest one."""
    most = float(np.finfo(np.float64).max)
    try:
        return max(-most, min(most, float(number)))
    except OverflowError:
        return most if number > 0 else -most


def create_table(client: MilvusClient, name: str, table: Mapping[str, DataType]) -> None:
    """Creates a collection, given its fields by name; the first one is the key."""
    schema = MilvusClient.create_schema(auto_id=False, enable_dynamic_field=False)
    index = client.prepare_index_params()
    for at, (field, kind) in enumerate(table.items()):
        how: dict[str, Any] = {"is_primary": True} if at == 0 else {}
        if kind == DataType.VARCHAR:
            how["max_length"] = MAX_BYTES
        if kind == DataType.ARRAY:
            element = DataType.INT32 if field == NUMBERS else DataType.INT64
            how |= {"element_type": element, "max_capacity": MAX_LABELS}
        if kind == DataType.FLOAT_VECTOR:
            how["dim"] = 1
            index.add_index(field, index_type="FLAT", metric_type=METRIC)
        if kind == DataType.SPARSE_FLOAT_VECTOR:
            index.add_index(field, index_type="SPARSE_INVERTED_INDEX", metric_type=METRIC)
        schema.add_field(field, kind, **how)
    client.create_collection(name, schema=schema, timeout=_TIMEOUT)
    _index(client, name, index)


def _index(client: MilvusClient, name: str, index: Any) -> None:
    # Not waited for: the client would sleep half a second, and what is loaded later is indexed.
    client.create_index(name, index, timeout=_TIMEOUT, sync=False)


def _load(client: MilvusClient, name: str, indexed: Iterable[str]) -> None:
    client.flush(name, timeout=_TIMEOUT)
    index_scalars(client, name, indexed)
    client.load_collection(name, timeout=_TIMEOUT)


def index_scalars(client: MilvusClient, name: str, fields: Iterable[str]) -> None:
    """Indexes numbers and arrays of numbers of a collection for conditions."""
    for field in fields:
        index = client.prepare_index_params()
        index.add_index(field, index_type="INVERTED")
        # milvus-lite does not index arrays; conditions then scan them with the same result.
        with suppress(MilvusException):
            _index(client, name, index)


def _insert(client: MilvusClient, name: str, entities: Iterable[Entity]) -> None:
    for batch in batches(entities):
        client.insert(name, batch, timeout=_TIMEOUT)


def batches(entities: Iterable[Entity]) -> Iterator[list[Entity]]:
    """Yields entities in groups that a request takes."""
    batch: list[Entity] = []
    size = 0
    for entity in entities:
        batch.append(entity)
        for value in entity.values():
            if isinstance(value, str):
                size += len(value.encode())
            else:
                size += _NUMBER_BYTES * (len(value) if isinstance(value, list | dict) else 1)
        if len(batch) == _INSERT_ROWS or size > _INSERT_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
