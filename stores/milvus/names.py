"""How versions, rows and filters are expressed in Milvus, and which index types are built there.

The vectors of a version are a collection of their own, whose name tells the index and the
version. An alias with the index's name leads to the active version's collection. A row of the
collection is a row of `documents.arrow`, with its vector and the labels of its metadata values
(`core/filters.py`), which filters are expressions on.

A version folder without vectors has a file that names the collection.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from core.errors import CareError, IndexVersionError

COLLECTION = "vectors.milvus"

ROW, VECTOR, LABELS = "row", "vector", "labels"
# Of unit vectors the inner product is the cosine similarity.
METRIC = "IP"
# What Milvus returns at most for one query; its limit for other results is the same.
MAX_HITS = 16_384
MAX_LABELS = 4_096
# Milvus asks for a beam no wider than this.
_MAX_EF = 32_768

_PREFIX = "care_"
# Escaped text has two digits after each underscore.
_BETWEEN = "__"
_COLLECTION = re.compile(rf"{_PREFIX}(?P<name>\w+?){_BETWEEN}(?P<version>\w+)", re.ASCII)

_GRAPH = re.compile(r"HNSW(?P<links>[4-9]|[1-9]\d|1\d\d)(,Flat)?")
# Candidates while the graph is built; FAISS's 40 is too few where segments are large.
_CONSTRUCTION = 200
_FLAT_BELOW = 50_000
_EF_SEARCH = (16, 32, 64, 128, 256, 512, 1024)


def alias_name(index: str) -> str:
    """Returns the alias that leads to the active version of an index."""
    return _PREFIX + _escape(index)


def collection_name(index: str, version: str) -> str:
    """Returns the collection of a version; no two versions share one."""
    return f"{_PREFIX}{_escape(index)}{_BETWEEN}{_escape(version)}"


def version_of(collection: str) -> str:
    """Returns the version whose vectors a collection holds.

    Raises:
        IndexVersionError: If its name is not that of a version's collection.
    """
    match = _COLLECTION.fullmatch(collection)
    if not match:
        message = f"Milvus: '{collection}' is not the collection of an index version"
        raise IndexVersionError(message, code="foreign_collection", collection=collection)
    return _unescape(match["version"])


def read_collection(folder: Path) -> str | None:
    """Returns the collection of a version folder, or None if the vectors lie in the folder."""
    path = folder / COLLECTION
    return path.read_text(encoding="ascii").strip() if path.is_file() else None


def labels_expression(labels: Sequence[Sequence[int]]) -> str:
    """Returns what rows satisfy that have, for each of the fields, one of its labels."""
    return " and ".join(f"array_contains_any({LABELS}, {list(field)})" for field in labels)


def rows_expression(rows: Sequence[int]) -> str:
    """Returns what these rows satisfy."""
    return f"{ROW} in {list(rows)}"


def search_parameters(parameters: Mapping[str, int], depth: int) -> dict[str, object]:
    """Returns the parameters of a search for `depth` hits as Milvus takes them.

    Those of the index are `efSearch`, or none for an exact one; no beam is narrower than `depth`.
    """
    ef = parameters.get("efSearch")
    beam = {} if ef is None else {"ef": min(_MAX_EF, max(ef, depth))}
    return {"metric_type": METRIC, "params": beam}


def default_factory(count: int) -> str:
    """Returns the factory string for `count` vectors; Milvus cuts them into segments itself."""
    return "Flat" if count < _FLAT_BELOW else "HNSW32"


def check_factory(factory: str) -> None:
    """Raises CareError if a factory string is neither Flat nor a graph."""
    if factory != "Flat" and not _GRAPH.fullmatch(factory):
        message = f"factory '{factory}' is not built in Milvus: use Flat or HNSW32"
        raise CareError(message, code="unsupported_factory", factory=factory)


def index_parameters(factory: str) -> tuple[str, dict[str, int]]:
    """Returns the index type of Milvus and its parameters, of a factory that was checked."""
    if not (graph := _GRAPH.fullmatch(factory)):
        return "FLAT", {}
    return "HNSW", {"M": int(graph["links"]), "efConstruction": _CONSTRUCTION}


def parameters_by_cost(factory: str) -> list[dict[str, int]]:
    """Returns the parameters that such an index can be searched with, cheapest first."""
    return [{}] if factory == "Flat" else [{"efSearch": width} for width in _EF_SEARCH]


def _escape(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9]", lambda found: f"_{ord(found[0]):02x}", text)


def _unescape(text: str) -> str:
    return re.sub(r"_([0-9a-f]{2})", lambda found: chr(int(found[1], 16)), text)
