"""Index types: the factory strings that are supported, the default one, and sizes on disk."""

import math
import re

import faiss

from core.errors import CareError

# Vectors for each inverted list, and for each centroid of a product quantiser, below which
# k-means finds none that hold for other vectors than the sample's (FAISS warns below 39).
ROWS_PER_LIST = 39
_ROWS_PER_CENTROID = 4

# FAISS aborts the process on fewer than two links and computes infinite levels with one.
_GRAPH = re.compile(r"HNSW([4-9]|[1-9]\d{1,2})(,(Flat|SQ8|SQfp16))?")
# Scores of product codes are too coarse to be returned: they need what they are refined with.
_LISTS = re.compile(
    r"IVF(?P<lists>[1-9]\d{0,6}),"
    r"(Flat|SQ8|PQ(?P<parts>[1-9]\d{0,3})(?P<bits>x4fs|x8)?,(RFlat|Refine\((Flat|SQ8|SQfp16)\)))"
)

# Below what count which type. Figures are of 768 dimensions, one thread, a recall@10 of 0.99.
_BY_COUNT = (
    # An exact scan takes a few milliseconds, and nothing can be missed.
    (50_000, "Flat"),
    # 1.2 ms at 100,000 vectors, where 8-bit codes end at a recall of 0.987. A graph is built with
    # all its vectors in memory, 3.3 kB each: 16 GB here, where the line is drawn without a figure.
    (5_000_000, "HNSW32,Flat"),
)
# Beyond: 0.2 kB of memory for each vector and 1.5 kB mapped from disk. At 100,000 vectors recall
# reaches 0.997. With 8-bit refinement it ends at 0.989, built in an eighth of the graph's time.
_BEYOND = "IVF{lists},PQ{parts}x4fs,Refine(SQfp16)"

_ID_BYTES = 8
_LINK_BYTES = 4
# Of each vector in a graph: where its links begin, and its level.
_NODE_BYTES = 8 + 4


def default_factory(count: int, dimension: int) -> str:
    """Returns the FAISS factory string for `count` vectors."""
    for below, factory in _BY_COUNT:
        if count < below:
            return factory
    # The power of two next to 4 √count: scanning lists then costs about as much as choosing them.
    lists = 2 ** round(math.log2(4 * math.sqrt(count)))
    parts = dimension if dimension % 2 else dimension // 2
    return _BEYOND.format(lists=lists, parts=parts)


def check_factory(factory: str, dimension: int, count: int | None = None) -> None:
    """Checks a factory string before any work is done; `count` is None while not known.

    Raises:
        CareError: If the index type is not one that this project builds and searches, or these
            vectors cannot train it.
    """
    if factory == "Flat" or _GRAPH.fullmatch(factory):
        return
    match = _LISTS.fullmatch(factory)
    if not match:
        raise CareError(
            f"factory '{factory}' is not supported: use Flat, HNSW32 (or 4 to 999 links), "
            "HNSW32,SQ8, HNSW32,SQfp16, IVF1024,Flat (or as many lists as you like), IVF1024,SQ8, "
            "or IVF1024,PQ96x8 or IVF1024,PQ384x4fs followed by ,Refine(SQ8), ,Refine(SQfp16) "
            "or ,RFlat",
            code="unsupported_factory",
            factory=factory,
        )
    if match["parts"] and dimension % int(match["parts"]):
        raise CareError(
            f"factory '{factory}' cuts vectors into {match['parts']} parts, which does not divide "
            f"their {dimension} dimensions: use a divisor",
            code="factory_does_not_divide",
            factory=factory,
            dimension=dimension,
        )
    if count is None:
        return
    lists = int(match["lists"])
    centroids = 16 if match["bits"] == "x4fs" else 256
    if count < (needed := ROWS_PER_LIST * lists):
        most = count // ROWS_PER_LIST
        what = f"{lists} lists"
        advice = f"IVF{most} or fewer lists" if most else "Flat or HNSW32"
    elif match["parts"] and count < (needed := _ROWS_PER_CENTROID * centroids):
        what, advice = f"{centroids} centroids for each part", f"IVF{lists},SQ8 or HNSW32"
    else:
        return
    message = (
        f"factory '{factory}' needs {needed:,} vectors to train its {what}; there are {count:,}: "
        f"use {advice}"
    )
    raise CareError(message, code="too_few_vectors", factory=factory, needed=needed, count=count)


def index_bytes(factory: str, count: int, dimension: int) -> int:
    """Returns the size of `vectors.faiss` [bytes], to within a few percent."""
    index = faiss.index_factory(dimension, factory)
    refined = 0
    if isinstance(index, faiss.IndexRefine):
        refined = count * index.refine_index.sa_code_size()
        index = faiss.downcast_index(index.base_index)
    if isinstance(index, faiss.IndexHNSW):
        links = index.hnsw.nb_neighbors(1)
        # 2 M links on the lowest level; one vector in M^l reaches level l and has M there.
        graph = _LINK_BYTES * (2 * links + links / (links - 1)) + _NODE_BYTES
        return int(count * (graph + index.storage.sa_code_size()))
    if not isinstance(index, faiss.IndexIVF):
        return int(count * index.sa_code_size())
    # 4-bit codes lie in blocks of rows; a list's last one is half empty on average.
    filler = index.nlist * index.bbs // 2 if isinstance(index, faiss.IndexIVFFastScan) else 0
    codes = (count + filler) * index.code_size + count * _ID_BYTES
    centroids = index.nlist + (index.pq.ksub if hasattr(index, "pq") else 0)
    return int(refined + codes + centroids * 4 * dimension)
