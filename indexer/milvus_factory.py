"""Which indexes of Milvus are built, named by the factory strings that FAISS has for them."""

import re

from core.errors import CareError

_GRAPH = re.compile(r"HNSW(?P<links>[4-9]|[1-9]\d|1\d\d)(,Flat)?")
# Candidates while the graph is built; FAISS's 40 is too few where segments are large.
_CONSTRUCTION = 200
_FLAT_BELOW = 50_000
_EF_SEARCH = (16, 32, 64, 128, 256, 512, 1024)


def choose_factory(count: int) -> str:
    """Returns the factory string for `count` vectors; Milvus cuts them into segments itself."""
    return "Flat" if count < _FLAT_BELOW else "HNSW32"


def check_factory(factory: str) -> None:
    """Refuses a factory string that is not built in Milvus.

    Raises:
        CareError: If it is neither Flat nor a graph.
    """
    if factory != "Flat" and not _GRAPH.fullmatch(factory):
        raise CareError(f"factory '{factory}' is not built in Milvus: use Flat or HNSW32")


def index_parameters(factory: str) -> tuple[str, dict[str, int]]:
    """Returns the index type of Milvus and its parameters.

    Raises:
        CareError: If the factory is not built in Milvus.
    """
    check_factory(factory)
    graph = _GRAPH.fullmatch(factory)
    if not graph:
        return "FLAT", {}
    links = int(graph["links"])
    return "HNSW", {"M": links, "efConstruction": _CONSTRUCTION}


def parameters_by_cost(factory: str) -> list[dict[str, int]]:
    """Returns the parameters that such an index can be searched with, cheapest first."""
    return [{}] if factory == "Flat" else [{"efSearch": width} for width in _EF_SEARCH]
