"""`python -m …distributed.killed_ray_build FOLDER LOG TEXT`: killed when TEXT is encoded."""

import os
import sys
from functools import partial
from pathlib import Path

from indexer import ray_executor
from indexer.build import build
from indexer.ray_executor import RayExecutor
from tests.encoders import BigramEncoder
from tests.engines.distributed.encoders import LoggingEncoder, kill_driver
from tests.indexer.builds import BATCH_SIZE, build_options

if __name__ == "__main__":
    folder, log = Path(sys.argv[1]), Path(sys.argv[2])
    (log / "driver").write_text(str(os.getpid()))
    # An actor that starts late must not delay the shards of the others until the end.
    ray_executor._AHEAD = 1
    executor = RayExecutor(
        partial(LoggingEncoder, log, kill_driver, sys.argv[3]), BATCH_SIZE, actors=2
    )
    options = build_options(folder, folder / "corpus.jsonl", executor=executor)
    build(options, BigramEncoder("document"), BigramEncoder("query"))
