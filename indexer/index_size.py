"""What an index file takes on disk, from its factory string alone."""

import re

_ID_BYTES = 8
_LINK_BYTES = 4
# Of each vector in a graph: where its links begin, and its level.
_NODE_BYTES = 8 + 4
# 4-bit codes lie in blocks of as many rows; a list's last block is half empty on average.
_BLOCK_ROWS = 32


def index_bytes(factory: str, count: int, dimension: int) -> int:
    """Returns the size of `vectors.faiss` [bytes], to within a few percent.

    Args:
        factory: A factory string that `check_factory` accepts.
        count: Vectors.
        dimension: Their dimensions.
    """
    head, *parts = factory.split(",")
    if head == "Flat":
        return count * _code_bytes("Flat", dimension)
    if head.startswith("HNSW"):
        links = int(head.removeprefix("HNSW"))
        # 2 M links on the lowest level; one vector in M^l reaches level l and has M there.
        graph = _LINK_BYTES * (2 * links + links / (links - 1)) + _NODE_BYTES
        return round(count * (graph + _code_bytes(parts[0] if parts else "Flat", dimension)))
    lists = int(head.removeprefix("IVF"))
    rows = count + lists * _BLOCK_ROWS // 2 if parts[0].endswith("x4fs") else count
    size = rows * _code_bytes(parts[0], dimension) + count * _ID_BYTES
    size += lists * _code_bytes("Flat", dimension)
    if parts[0].startswith("PQ"):
        size += (16 if parts[0].endswith("x4fs") else 256) * _code_bytes("Flat", dimension)
    if match := re.fullmatch(r"R(?:efine\()?(\w+?)\)?", parts[1] if len(parts) > 1 else ""):
        size += count * _code_bytes(match[1], dimension)
    return size


def _code_bytes(code: str, dimension: int) -> int:
    if match := re.fullmatch(r"PQ(\d+)x(8|4fs)", code):
        parts = int(match[1])
        return parts if match[2] == "8" else (parts + 1) // 2
    return {"Flat": 4, "SQfp16": 2, "SQ8": 1}[code] * dimension
