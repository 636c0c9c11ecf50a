"""FAISS index types: supported factory strings, defaults, and sizes on disk."""

import math
import re

import faiss

from core.errors import CareError
from stores.recall import has_copies

# Minimum training vectors per inverted list and per centroid of a product quantiser; with fewer,
# k-means overfits the sample (FAISS warns below 39).
ROWS_PER_LIST = 39
_ROWS_PER_CENTROID = 4

# At least four links: FAISS aborts the process with none and computes infinite levels with one.
_GRAPH = re.compile(r"HNSW([4-9]|[1-9]\d{1,2})(,(Flat|SQ8|SQfp16))?")
# A graph of vectors that are reduced to their principal components, whose scores are too
# inaccurate to be returned.
_REDUCED = re.compile(
    r"PCA(?P<dimensions>[1-9]\d{0,3}),HNSW([4-9]|[1-9]\d{1,2}),SQ8,"
    r"(RFlat|Refine\((Flat|SQ8|SQfp16)\))"
)
# Product codes require a refinement, because their scores are too inaccurate to be returned.
_LISTS = re.compile(
    r"IVF(?P<lists>[1-9]\d{0,6}),"
    r"(Flat|SQ8|PQ(?P<parts>[1-9]\d{0,3})(?P<bits>x4fs|x8)?,(RFlat|Refine\((Flat|SQ8|SQfp16)\)))"
)

# Most components (vectors × dimensions) that are searched exactly by default. A scan takes 0.16 ns
# of one thread for each, so up to 0.25 ms: a tenth of what the query encoder of care-mini takes.
# Above, a graph is faster than the scan: 0.25 instead of 1.1 ms for 16,000 × 384 at recall@10 0.99.
_MOST_SCANNED = 1_500_000
# Default type below `_MOST_IN_GRAPH` vectors: at 100,000 × 768 a search takes 1.2 ms; with 8-bit
# codes the recall does not exceed 0.987. The graph is built in memory, 3.3 kB per vector: 16 GB at
# this limit, which is not based on a measurement.
_GRAPH_OF_VECTORS, _MOST_IN_GRAPH = "HNSW32,Flat", 5_000_000
# Default type for vectors that have copies.
_OF_COPIES = "IVF{lists},Flat"
# Default type for more vectors: 0.2 kB of memory per vector and 1.5 kB mapped from disk. At 100,000
# vectors the recall reaches 0.997; with 8-bit refinement it does not exceed 0.989. The build takes
# an eighth of the graph's time.
_BEYOND = "IVF{lists},PQ{parts}x4fs,Refine(SQfp16)"

_ID_BYTES = 8
_LINK_BYTES = 4
# Per vector of a graph: offset of its links, and its level.
_NODE_BYTES = 8 + 4


def default_factory(count: int, dimension: int, different: int, crowded: int = 0) -> str:
    """Returns the default FAISS factory string for `count` vectors; see `stores.registry`."""
    if count * dimension <= _MOST_SCANNED:
        return "Flat"
    # The power of two nearest to 4 √different balances the costs of choosing and scanning lists.
    lists = min(2 ** round(math.log2(4 * math.sqrt(different))), count // ROWS_PER_LIST)
    if count < _MOST_IN_GRAPH:
        copies = has_copies(count, different, crowded)
        return _OF_COPIES.format(lists=lists) if copies else _GRAPH_OF_VECTORS
    parts = dimension if dimension % 2 else dimension // 2
    return _BEYOND.format(lists=lists, parts=parts)


def reduced_graph(index: faiss.Index) -> faiss.IndexPreTransform | None:
    """Returns the part of an index that reduces vectors and has their graph, if it has one."""
    if not isinstance(index, faiss.IndexRefine):
        return None
    base = faiss.downcast_index(index.base_index)
    return base if isinstance(base, faiss.IndexPreTransform) else None


def check_factory(factory: str, dimension: int, count: int | None = None) -> None:
    """Checks a factory string before a build; `count` is None if it is unknown.

    Raises:
        CareError: If the index type is not supported, does not fit the dimension, or needs more
            vectors for training.
    """
    if factory == "Flat" or _GRAPH.fullmatch(factory):
        return
    if match := _REDUCED.fullmatch(factory):
        if int(match["dimensions"]) >= dimension:
            message = f"factory '{factory}' keeps {match['dimensions']} dimensions of vectors that "
            message += f"have {dimension}: use fewer, such as a quarter"
            raise CareError(
                message, code="factory_keeps_dimensions", factory=factory, dimension=dimension
            )
        return
    match = _LISTS.fullmatch(factory)
    if not match:
        raise CareError(
            f"factory '{factory}' is not supported: use Flat, HNSW32 (4 to 999 links), HNSW32,SQ8, "
            "HNSW32,SQfp16, IVF1024,Flat (any number of lists), IVF1024,SQ8, or PCA192,HNSW32,SQ8 "
            "(any number of dimensions), IVF1024,PQ96x8 or IVF1024,PQ384x4fs with ,Refine(SQ8), "
            ",Refine(SQfp16) or ,RFlat",
            code="unsupported_factory",
            factory=factory,
        )
    if match["parts"] and dimension % int(match["parts"]):
        raise CareError(
            f"factory '{factory}' splits vectors into {match['parts']} parts: use a divisor of "
            f"their {dimension} dimensions",
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
        what, advice = f"{centroids} centroids per part", f"IVF{lists},SQ8 or HNSW32"
    else:
        return
    message = (
        f"factory '{factory}' needs {needed:,} vectors to train {what}, but there are {count:,}: "
        f"use {advice}"
    )
    raise CareError(message, code="too_few_vectors", factory=factory, needed=needed, count=count)


def index_bytes(factory: str, count: int, dimension: int) -> int:
    """Returns the estimated size of `vectors.faiss` [bytes]; the error is a few percent."""
    index = whole = faiss.index_factory(dimension, factory)  # which owns its parts
    refined = 0
    if isinstance(whole, faiss.IndexRefine):
        refined = count * whole.refine_index.sa_code_size()
        index = faiss.downcast_index(whole.base_index)
    if isinstance(index, faiss.IndexPreTransform):
        index = faiss.downcast_index(index.index)
        refined += 4 * dimension * index.d  # the components
    if isinstance(index, faiss.IndexHNSW):
        links = index.hnsw.nb_neighbors(1)
        # 2 M links on level 0; one vector in M^l has M links on level l.
        graph = _LINK_BYTES * (2 * links + links / (links - 1)) + _NODE_BYTES
        return int(refined + count * (graph + index.storage.sa_code_size()))
    if not isinstance(index, faiss.IndexIVF):
        return int(count * index.sa_code_size())
    # 4-bit codes are stored in blocks of rows; the last block of a list is half empty on average.
    padding = index.nlist * index.bbs // 2 if isinstance(index, faiss.IndexIVFFastScan) else 0
    codes = (count + padding) * index.code_size + count * _ID_BYTES
    centroids = index.nlist + (index.pq.ksub if hasattr(index, "pq") else 0)
    return int(refined + codes + centroids * 4 * dimension)
