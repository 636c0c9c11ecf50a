"""`python -m tests.distributed.killed_ray_build FOLDER LOG TEXT`: dies when TEXT is encoded."""

import os
import sys
from functools import partial
from pathlib import Path

from indexer.build import build
from indexer.ray_encoding import RayEngine
from tests.distributed.encoders import LoggingEncoder, kill_driver
from tests.encoders import BigramEncoder
from tests.indexer.builds import build_options

if __name__ == "__main__":
    folder, log = Path(sys.argv[1]), Path(sys.argv[2])
    (log / "driver").write_text(str(os.getpid()))
    engine = RayEngine(partial(LoggingEncoder, log, kill_driver, sys.argv[3]), actors=2)
    options = build_options(folder, folder / "corpus.jsonl", engine=engine)
    build(options, BigramEncoder("document"), BigramEncoder("query"))
