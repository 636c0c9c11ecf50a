from typing import Any

from loadtest.bench.comparison import Other, compare
from loadtest.bench.options import Options
from loadtest.bench.weights_folders import TORCH

GOAL = 3.0


def run(options: Options) -> dict[str, Any]:
    """Compares with FastAPI, sentence-transformers and FAISS in one function."""
    other = Other(
        name="FastAPI + sentence-transformers",
        python=options.sentence_transformers,
        application="sentence_transformers_app",
        weights=options.weights / TORCH,
        goal=GOAL,
    )
    return compare(options, other)
