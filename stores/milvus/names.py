"""Names, fields, filter expressions and index types in Milvus.

Each version has collections of its own, whose names contain the index and the version: of vectors,
and of the tables of its rows, terms and values. A row of the vectors is one of the rows, with the
labels of its metadata values (`core/filters.py`); filters are expressions on labels.

The folder of such a version has a file with the name of the collection of vectors.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from core.documents import columns_of
from core.errors import CareError, IndexVersionError
from core.files import read_small
from core.filter_rows import Requirement
from core.filters import filter_values
from core.types import Document
from stores.recall import has_copies

COLLECTION = "vectors.milvus"
# The collection of the small files of versions, and of the heads of indexes.
VERSIONS = "care__versions"

ROW, VECTOR, LABELS = "row", "vector", "labels"
# The inner product of unit vectors is their cosine similarity.
METRIC = "IP"
# Maximum number of hits of a search in Milvus, and of results of a query.
MAX_HITS = 16_384
MAX_LABELS = 4_096
# Bytes of a VARCHAR.
MAX_BYTES = 65_535
# Labels of one field in an expression, 40 kB of text.
_MAX_EXPRESSION_LABELS = 4_096
# Maximum beam width in Milvus.
_MAX_EF = 32_768

_PREFIX = "care_"
# Unambiguous, because in escaped text two hexadecimal digits follow each underscore.
_BETWEEN = "__"
_COLLECTION = re.compile(rf"{_PREFIX}(?P<name>\w+?){_BETWEEN}(?P<version>\w+)", re.ASCII)

_GRAPH = re.compile(r"HNSW(?P<links>[4-9]|[1-9]\d|1\d\d)(,Flat)?")
# Candidates during construction of the graph; FAISS's default of 40 is too low for large segments.
_CONSTRUCTION = 200
_FLAT_BELOW = 50_000
_EF_SEARCH = (16, 32, 64, 128, 256, 512, 1024)


def head_name(index: str) -> str:
    """Returns the name of the head of an index (`stores/milvus/versions.py`)."""
    return _PREFIX + _escape(index)


def index_of_head(head: str) -> str:
    """Returns the index that has a head of some name."""
    return _unescape(head.removeprefix(_PREFIX))


def collection_name(index: str, version: str) -> str:
    """Returns the name of the collection of a version."""
    return f"{_PREFIX}{_escape(index)}{_BETWEEN}{_escape(version)}"


def table_names(collection: str) -> tuple[str, str, str]:
    """Returns the names of the other collections of a version: of its rows, terms and values."""
    rows, terms, values = (f"{collection}{_BETWEEN}{kind}" for kind in ("rows", "terms", "values"))
    return rows, terms, values


def index_of(collection: str) -> str | None:
    """Returns the index of a version's collection; None if it is another collection."""
    match = _COLLECTION.fullmatch(collection)
    return _unescape(match["name"]) if match else None


def version_of(collection: str) -> str:
    """Returns the version of a collection.

    Raises:
        IndexVersionError: If the name is not that of a version's collection.
    """
    match = _COLLECTION.fullmatch(collection)
    if not match:
        message = f"Milvus: collection '{collection}' does not belong to an index version"
        raise IndexVersionError(message, code="foreign_collection", collection=collection)
    return _unescape(match["version"])


def read_collection(folder: Path) -> str | None:
    """Returns the collection of a version, or None if it is in files.

    Raises:
        IndexVersionError: If the file names a collection of another index, which commands on this
            one could drop.
    """
    path = folder / COLLECTION
    try:
        collection = read_small(path, links=False).decode(errors="replace").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        reason = f"cannot be read ({error.strerror}): build the index again"
        raise IndexVersionError.at(path, reason, "unreadable_file") from error
    match = _COLLECTION.fullmatch(collection)
    if not match or match["name"] != _escape(folder.absolute().parent.name):
        reason = "does not name a collection of this index: build the index under this name"
        raise IndexVersionError.at(path, reason, "foreign_collection")
    return collection


def labels_expression(requirements: Sequence[Requirement]) -> tuple[str, bool]:
    """Returns an expression for rows that meet requirements, and whether it has all of them.

    A requirement of too many labels for an expression is left out.
    """
    fitting = [one for one in requirements if len(one.labels) <= _MAX_EXPRESSION_LABELS]
    terms = [
        f"{'not ' * one.excluded}array_contains_any({LABELS}, {one.labels.tolist()})"
        for one in fitting
    ]
    return " and ".join(terms), len(fitting) == len(requirements)


def rows_expression(rows: Sequence[int]) -> str:
    """Returns an expression for rows by their number."""
    return f"{ROW} in {list(map(int, rows))}"


def too_large(document: Document) -> str:
    """Returns why Milvus cannot keep a document or chunk; "" if it can."""
    for name, text in columns_of(document, chunked=False).items():
        if (size := len(text.encode())) > MAX_BYTES:
            return f"{name} takes {size:,} bytes, and an index in Milvus at most {MAX_BYTES:,}"
    count = sum(len(filter_values(value)) for value in document.metadata.values())
    if count > MAX_LABELS:
        return f"metadata has {count:,} values, and an index in Milvus at most {MAX_LABELS:,}"
    return ""


def search_parameters(parameters: Mapping[str, int], depth: int) -> dict[str, object]:
    """Converts parameters of a manifest for a search with `depth` hits in Milvus.

    Args:
        parameters: `efSearch`, or {} for exact search.
        depth: Minimum beam width.
    """
    ef = parameters.get("efSearch")
    beam = {} if ef is None else {"ef": min(_MAX_EF, max(ef, depth))}
    return {"metric_type": METRIC, "params": beam}


def default_factory(count: int, different: int) -> str:
    """Returns the default factory string for `count` vectors, `different` of them distinct."""
    return "Flat" if count < _FLAT_BELOW or has_copies(count, different) else "HNSW32"


def check_factory(factory: str) -> None:
    """Raises CareError if a factory string is not supported in Milvus."""
    if factory != "Flat" and not _GRAPH.fullmatch(factory):
        message = (
            f"factory '{factory}' is not supported in Milvus: use Flat or HNSW32 (4 to 199 links)"
        )
        raise CareError(message, code="unsupported_factory", factory=factory)


def index_parameters(factory: str) -> tuple[str, dict[str, int]]:
    """Returns the index type in Milvus and its parameters for a supported factory."""
    if not (graph := _GRAPH.fullmatch(factory)):
        return "FLAT", {}
    return "HNSW", {"M": int(graph["links"]), "efConstruction": _CONSTRUCTION}


def parameters_by_cost(factory: str) -> list[dict[str, int]]:
    """Returns the search parameters of an index type, the cheapest first."""
    return [{}] if factory == "Flat" else [{"efSearch": width} for width in _EF_SEARCH]


def _escape(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9]", lambda found: f"_{ord(found[0]):02x}", text)


def _unescape(text: str) -> str:
    return re.sub(r"_([0-9a-f]{2})", lambda found: chr(int(found[1], 16)), text)
