"""Runs a recipe: each stage in a folder of its own, resumed if interrupted, reused if whole.

OUT/init/…                   initial checkpoints that were made
OUT/stages/<name>-<key>/     a finished stage; the key is a checksum of all that went into it
    result.json              settings, seed, data checksums, counts, encoders; written last
    metrics.json             losses and measures over steps
    curves.png, tensorboard/
    query/, document/        the encoders that it trained
    pair.toml                the pair that came out
OUT/stages/.<name>-<key>.partial/   a stage at work, with its checkpoints
OUT/vectors/…                vectors of frozen encoders, for later stages and runs
OUT/runs/<recipe>-seed<n>/   the last pair, the resolved recipe, and what each stage measured
"""

import shutil
import time
from collections.abc import Callable
from pathlib import Path

from transformers import set_seed

from core.files import exclusive, publish
from training.data import read_dev
from training.distributed import processes
from training.encoder import EncoderCheckpoint
from training.files import RESULT, checksum, read_json, writing
from training.init import prepare
from training.recipe import Recipe
from training.results import clear, last_measures, write_result, write_run
from training.stages.base import Context, Stage
from training.stages.trainer import CHECKPOINTS

Report = Callable[[str], None]


def run(recipe: Recipe, out: Path, seed: int, report: Report) -> Path:
    """Runs a recipe with one seed and returns the folder of the run, which is in `out`.

    Runs with the same `out` share finished stages. `report` is called with each line of progress.
    """
    with writing(out):
        planned = Context(seed, Path())
        for stage in recipe.stages:
            stage.check(planned, recipe.encoders.keys())
            stage.publish(planned, Path())
        context = Context(seed, out / "vectors", recipe.dev)
        # One process makes what all read.
        with processes().main_process_first():
            (out / "stages").mkdir(parents=True, exist_ok=True)
            for side, init in recipe.encoders.items():
                context.encoders[side] = prepare(init, side, out / "init")
        context.dev_set = read_dev(recipe.dev) if recipe.dev else None
        for stage in recipe.stages:
            folder = _finished(stage, context, recipe, out, report)
            for side, facts in read_json(folder / RESULT)["encoders"].items():
                found = EncoderCheckpoint.model_validate(facts)
                context.encoders[side] = found.moved(lambda path: out / path)
            stage.publish(context, folder)
            if processes().is_main_process and (last := last_measures(folder)):
                report(f"{stage.label}: {last}")
        main = processes().is_main_process
        return write_run(recipe, seed, context.folders, out) if main else out


def _finished(stage: Stage, context: Context, recipe: Recipe, out: Path, report: Report) -> Path:
    """Returns the folder of a stage's result, made now if it is not there."""
    inputs = stage.inputs(context)
    key = checksum(inputs)
    folder = out / "stages" / f"{stage.label}-{key[:12]}"
    partial = folder.with_name(f".{folder.name}.partial")
    reused = (folder / RESULT).is_file()
    state = processes()
    # All have looked before one begins: it may be done before another looks.
    state.wait_for_everyone()
    report(f"{stage.label}: {'reused ' if reused else ''}{folder}")
    if reused:
        return folder
    # New adapters and decoders are drawn before training begins.
    set_seed(stage.run_seed(context))
    with writing(partial):
        partial.mkdir(exist_ok=True)
        if not state.is_main_process:
            stage.run(context, partial)
        else:
            with exclusive(partial):
                clear(partial)
                started = time.monotonic()
                outcome = stage.run(context, partial)
                seconds = time.monotonic() - started
                write_result(stage, context, recipe, inputs, outcome, partial, folder, seconds)
                shutil.rmtree(partial / CHECKPOINTS, ignore_errors=True)
                (partial / ".lock").unlink()
                publish(partial, folder)
        state.wait_for_everyone()
    return folder
