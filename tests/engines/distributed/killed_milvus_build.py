"""`python -m tests.engines.distributed.killed_milvus_build FOLDER URI`: a killed build.

It receives SIGKILL after some of the vectors are inserted into Milvus.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from pymilvus import MilvusClient

from indexer.build import build
from stores.milvus import store as milvus_store
from stores.registry import MilvusAddress, VectorStores
from tests.encoders import BigramEncoder
from tests.indexer.builds import build_options


class DyingClient(MilvusClient):
    """Inserts one batch and kills its own process at the next one."""

    taken = 0

    def insert(self, *arguments: Any, **options: Any) -> Any:
        if self.taken:
            os.kill(os.getpid(), signal.SIGKILL)
        self.taken += 1
        return super().insert(*arguments, **options)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    milvus_store.MilvusClient = DyingClient
    milvus_store._INSERT_ROWS = 16
    options = build_options(
        folder,
        folder / "corpus.jsonl",
        store="milvus",
        stores=VectorStores(MilvusAddress(sys.argv[2])),
    )
    build(options, BigramEncoder("document"), BigramEncoder("query"))
