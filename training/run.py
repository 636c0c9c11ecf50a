"""Runs recipes: executes stages, resumes interrupted ones and reuses finished ones.

OUT/init/…                   pruned and converted initial checkpoints
OUT/stages/<name>-<key>/     a finished stage; the key is a checksum of all its inputs
    result.json              settings, seed, data checksums, counts, encoders; written last
    metrics.json             losses and dev metrics over steps
    curves.png, tensorboard/
    query/, document/        the trained encoders
    pair.toml                the trained pair
OUT/stages/.<name>-<key>.partial/   an unfinished stage with its checkpoints
OUT/data/…                   texts and token ids of stages, shared by stages and runs
OUT/vectors/…                cached vectors of frozen encoders, shared by stages and runs
OUT/runs/<recipe>-seed<n>/   the last pair, the resolved recipe, and the metrics of each stage
"""

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import transformers
from transformers import set_seed

from core.encoders import Role
from core.files import publish
from core.locks import exclusive
from training.data import read_dev
from training.distributed import from_main_process, processes, wait_for_all
from training.encoder import EncoderCheckpoint, fast_bf16
from training.files import RESULT, checksum, read_json, writing
from training.init import prepare
from training.recipe import Recipe
from training.results import clear, last_measures, write_result, write_run
from training.stages.base import Context, Stage
from training.stages.trainer import CHECKPOINTS

Report = Callable[[str], None]


def run(recipe: Recipe, out: Path, seed: int, report: Report) -> Path:
    """Runs a recipe with one seed in `out`, and returns the folder of the run.

    Runs with the same `out` share finished stages. The key `seed` of a stage replaces `seed`.
    """
    with writing(out):
        planned = Context(seed, Path())
        for stage in recipe.stages:
            stage.check(planned, recipe.encoders.keys())
            stage.publish(planned, Path())
        context = Context(seed, out, recipe.dev)
        context.encoders |= from_main_process(lambda: _initial(recipe, out))
        context.dev_set = read_dev(recipe.dev) if recipe.dev else None
        for stage in recipe.stages:
            folder = _finished(stage, context, recipe, out, report)
            for side, facts in read_json(folder / RESULT)["encoders"].items():
                found = EncoderCheckpoint.model_validate(facts)
                context.encoders[side] = found.moved(lambda path: out / path)
            stage.publish(context, folder)
            if processes().is_main_process and (last := last_measures(folder)):
                report(f"{stage.label}: {last}")
        folder = out / "runs" / f"{recipe.name}-seed{seed}"
        if processes().is_main_process:
            write_run(recipe, seed, context.folders, folder)
        wait_for_all()
        return folder


def silence_transformers_logging() -> None:
    """Hides the warnings and progress bars of transformers; training has its own progress bar."""
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def _initial(recipe: Recipe, out: Path) -> dict[Role, EncoderCheckpoint]:
    """Makes the initial checkpoints, and returns them by side."""
    (out / "stages").mkdir(parents=True, exist_ok=True)
    return {side: prepare(init, side, out / "init") for side, init in recipe.encoders.items()}


def _finished(stage: Stage, context: Context, recipe: Recipe, out: Path, report: Report) -> Path:
    """Returns the folder of a finished stage; runs the stage if necessary."""
    inputs = from_main_process(lambda: stage.inputs(context))
    key = checksum(inputs)
    folder = out / "stages" / f"{stage.label}-{key[:12]}"
    partial = folder.with_name(f".{folder.name}.partial")
    reused = from_main_process((folder / RESULT).is_file)
    state = processes()
    report(f"{stage.label}: {'reused ' if reused else ''}{folder}")
    if reused:
        return folder
    if getattr(stage, "precision", None) == "bf16" and not fast_bf16():
        report(
            f"{stage.label}: this processor has no instructions for bf16 (AVX512-BF16 or AMX): "
            "fp32 is several times as fast; set precision: fp32 in the stage"
        )
    # New adapters and decoders are initialised before the Trainer sets its seed.
    set_seed(stage.run_seed(context))
    with writing(partial):
        partial.mkdir(exist_ok=True)
        if not state.is_main_process:
            stage.run(context, partial)
        else:
            with exclusive(partial, "train"):
                clear(partial)
                started = time.monotonic()
                outcome = stage.run(context, partial)
                seconds = time.monotonic() - started
                write_result(stage, context, recipe, inputs, outcome, partial, folder, seconds)
                shutil.rmtree(partial / CHECKPOINTS, ignore_errors=True)
                (partial / ".lock").unlink()
                publish(partial, folder)
        wait_for_all()
    return folder
