"""The work of one of two processes of a teacher stage; has few imports: each process is spawned."""

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

# Time-out of the process group, and the time that the first process encodes [s].
TIME_OUT, WORK = 1, 3


def encode_slowly(process: int, recipe: str, out: str) -> None:
    ranks = {"RANK": str(process), "LOCAL_RANK": str(process), "WORLD_SIZE": "2"}
    # accelerate wants an address, although the process group exists.
    os.environ.update(ranks, MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    rendezvous = {"rank": process, "world_size": 2, "init_method": f"file://{out}.rendezvous"}
    distributed.init_process_group("gloo", **rendezvous)
    from training import vectors
    from training.recipe import load_recipe
    from training.run import run

    encode, encoded = vectors.encode, []

    def slow(encoder: Any, tokens: Any, **settings: Any) -> Any:
        if process == 0 and not encoded:
            time.sleep(WORK)
        encoded.append(len(tokens))
        return encode(encoder, tokens, **settings)

    vectors.encode = slow
    distributed.barrier()
    # Only now: processes start at different times.
    distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=TIME_OUT))
    run(load_recipe(Path(recipe)), Path(out), 0, lambda _: None)
    Path(f"{out}.{process}").write_text(str(sum(encoded)))
    distributed.destroy_process_group()
