"""`python -m tests.stores.killed_merge FOLDER`: a build that is killed while it merges its parts.

It receives SIGKILL, so no handler or cleanup runs.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import faiss

from indexer.build import build
from stores.faiss import parts as faiss_parts
from tests.encoders import BigramEncoder
from tests.indexer.builds import build_options

# Memory for 277 of 400 rows.
MEMORY_BYTES = 40_000


class KilledFaiss:
    """FAISS that kills the process at the tenth read of a part's codes or ids."""

    def __init__(self) -> None:
        self._left = 10

    def __getattr__(self, name: str) -> Any:
        return getattr(faiss, name)

    def rev_swig_ptr(self, *arguments: Any) -> Any:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return faiss.rev_swig_ptr(*arguments)


if __name__ == "__main__":
    faiss_parts.faiss = KilledFaiss()
    folder = Path(sys.argv[1])
    options = build_options(
        folder,
        folder / "corpus.jsonl",
        factory="IVF4,SQ8",
        recall=0.9,
        memory_gib=MEMORY_BYTES / 2**30,
    )
    build(options, BigramEncoder("document"), BigramEncoder("query"))
