"""The work of each of two training processes."""

import json
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import distributed
from torch.distributed.tensor import DTensor

from tests.training.gathering import write_gradients
from training import vectors
from training.distributed import processes
from training.recipe import load_recipe
from training.run import run
from training.stages.trainer import StageTrainer

# Functions that read all data or weights: only the main process calls them.
MAIN_ONLY = (
    "init.sha256_file",
    "stages.base.sha256_file",
    "vectors._key",
    "vectors.complete_shards",
)

# Time-out of the process group, and the time that the first process encodes [s].
TIME_OUT, WORK = 1, 2


def train(rank: int, folder: Path, names: Sequence[str]) -> None:
    """Runs recipes of a folder; writes facts about the trained weights that this process holds.

    Stages with sharded weights are interrupted after their first checkpoint and resumed.
    """
    processes()
    if rank:
        for name in MAIN_ONLY:
            patch(f"training.{name}", side_effect=AssertionError(name)).start()
    write_gradients(rank, folder / f"gradients{rank}.pt")
    found = {name: run_with_interruptions(folder / f"{name}.yaml", folder / name) for name in names}
    (folder / f"rank{rank}.json").write_text(json.dumps(found), encoding="utf-8")


def encode_slowly(rank: int, recipe: Path, out: Path) -> None:
    """Runs a recipe whose first process encodes longer than the group's time-out.

    Writes the number of texts that this process encoded.
    """
    processes()
    encode, encoded = vectors.encode, []

    def slow(encoder: Any, tokens: Any, **settings: Any) -> Any:
        if rank == 0 and not encoded:
            time.sleep(WORK)
        encoded.append(len(tokens))
        return encode(encoder, tokens, **settings)

    vectors.encode = slow
    distributed.barrier()
    # Only now: processes start at different times.
    distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=TIME_OUT))
    run(load_recipe(recipe), out, 0, lambda _: None)
    Path(f"{out}.{rank}").write_text(str(sum(encoded)))


def facts_of(trainer: StageTrainer) -> dict[str, Any]:
    """Returns a checksum of the trained weights, their dtypes and whether they are sharded."""
    values = [value for value in trainer._objective.parameters() if value.requires_grad]
    whole = [value.full_tensor() if isinstance(value, DTensor) else value for value in values]
    return {
        "weights": sha256(b"".join(v.detach().numpy().tobytes() for v in whole)).hexdigest(),
        "dtypes": sorted({str(value.dtype) for value in values}),
        "sharded": all(isinstance(value, DTensor) for value in values),
    }


def run_with_interruptions(recipe: Path, out: Path) -> dict[str, dict[str, Any]]:
    """Returns the facts of each training stage, and the time-out of the processes in seconds."""
    facts: dict[str, Any] = {}
    attempts: Counter[str] = Counter()
    fit, save = StageTrainer.fit, StageTrainer._save_checkpoint

    def fit_and_report(trainer: StageTrainer) -> None:
        label = trainer._stage.label
        attempts[label] += 1
        fit(trainer)
        facts[label] = facts_of(trainer) | {"attempts": attempts[label]}

    def save_and_interrupt(trainer: StageTrainer, *arguments: Any) -> None:
        save(trainer, *arguments)
        # The main process completes the checkpoint, which all processes must find.
        processes().wait_for_everyone()
        if trainer.sharded and attempts[trainer._stage.label] == 1:
            raise KeyboardInterrupt

    StageTrainer.fit = fit_and_report
    StageTrainer._save_checkpoint = save_and_interrupt
    try:
        while True:
            try:
                run(load_recipe(recipe), out, 0, lambda _: None)
                group = distributed.group.WORLD._get_backend(torch.device("cpu"))
                return facts | {"timeout": group.options._timeout.total_seconds()}
            except KeyboardInterrupt:
                continue
    finally:
        StageTrainer.fit, StageTrainer._save_checkpoint = fit, save
