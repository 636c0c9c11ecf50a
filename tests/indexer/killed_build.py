"""`python -m tests.indexer.killed_build FOLDER BATCHES`: a build that is killed after some batches.

It receives SIGKILL, so no handler or cleanup runs.
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


class KilledEncoder(BigramEncoder):
    """Encodes some batches and kills its own process at the next one."""

    def __init__(self, batches: int) -> None:
        super().__init__("document")
        self._batches = batches

    def encode(self, texts: Sequence[str]) -> Encoding:
        if len(texts) == 1:  # the check of the embedding space
            return super().encode(texts)
        if self._batches == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self._batches -= 1
        return super().encode(texts)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    options = build_options(folder, folder / "corpus.jsonl")
    build(options, KilledEncoder(int(sys.argv[2])), BigramEncoder("query"))
