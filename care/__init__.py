"""Public Python API: pairs of encoders, indexes, search, training and evaluation, without HTTP.

    import care

    version = care.build_index("mine", "corpus.jsonl")
    with care.open_index("mine") as index:
        hits = index.search("血压高吃什么", top_k=5)

The names are imported when they are used first: `import care` loads no library.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from care.evaluation import evaluate
    from care.indexing import IndexVersion, build_index, merge_index, update_index
    from care.options import IndexOptions
    from care.pairs import Pair, load_pair
    from care.search import SearchHits, SearchIndex, open_index
    from care.training import train
    from core.errors import CareError
    from core.types import Evidence, Hit

__all__ = [
    "CareError",
    "Evidence",
    "Hit",
    "IndexOptions",
    "IndexVersion",
    "Pair",
    "SearchHits",
    "SearchIndex",
    "build_index",
    "evaluate",
    "load_pair",
    "merge_index",
    "open_index",
    "train",
    "update_index",
]

_MODULES = {
    "CareError": "core.errors",
    "Evidence": "core.types",
    "Hit": "core.types",
    "IndexOptions": "care.options",
    "IndexVersion": "care.indexing",
    "Pair": "care.pairs",
    "SearchHits": "care.search",
    "SearchIndex": "care.search",
    "build_index": "care.indexing",
    "evaluate": "care.evaluation",
    "load_pair": "care.pairs",
    "merge_index": "care.indexing",
    "open_index": "care.search",
    "train": "care.training",
    "update_index": "care.indexing",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'care' has no attribute '{name}'")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
