"""`python -m tests.indexer.killed_build FOLDER BATCHES`: a build that dies after some batches.

It is killed as the kernel does it: no handler runs, nothing is tidied up.
"""

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from core.encoders import Encoding
from indexer.build import build
from tests.encoders import BigramEncoder
from tests.indexer.builds import build_options


class DyingEncoder(BigramEncoder):
    """Encodes some batches and kills its own process at the next."""

    def __init__(self, batches: int) -> None:
        super().__init__("document")
        self._batches = batches

    def encode(self, texts: Sequence[str]) -> Encoding:
        if len(texts) == 1:  # the check of the space, before all are encoded
            return super().encode(texts)
        if self._batches == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self._batches -= 1
        return super().encode(texts)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    options = build_options(folder, folder / "corpus.jsonl")
    build(options, DyingEncoder(int(sys.argv[2])), BigramEncoder("query"))
