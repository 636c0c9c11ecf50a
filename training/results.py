"""What a stage and a run leave on disk, as `training.run` describes."""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from matplotlib.figure import Figure

from core.encoders import Pair
from core.files import write_text
from core.provenance import environment
from core.records import write_json
from models.pairs import load_pair, write_pair
from training.files import CURVES, METRICS, PAIR, RECIPE, RESULT, TRIPLES, checksum, read_json
from training.recipe import Recipe
from training.stages.base import Context, Outcome, Stage, checksums

_LOSS, _MEASURE = "loss", "dev_nDCG@10"
# Records of a step that are not drawn.
_NOT_DRAWN = {"step", "epoch", "grad_norm", "learning_rate"}


def clear(partial: Path) -> None:
    """Deletes what a stage writes at its end: an earlier run may have been interrupted there."""
    for side in ("query", "document"):
        shutil.rmtree(partial / side, ignore_errors=True)
    for name in (RESULT, METRICS, PAIR, RECIPE, CURVES, TRIPLES):
        (partial / name).unlink(missing_ok=True)


def write_result(
    stage: Stage,
    context: Context,
    recipe: Recipe,
    inputs: Mapping[str, Any],
    outcome: Outcome,
    partial: Path,
    folder: Path,
    seconds: float,
) -> None:
    """Writes what came out of a stage into `partial`, which will be renamed to `folder`.

    The stage's key is a checksum of `inputs`.
    """
    key, out = checksum(inputs), folder.parent.parent
    trained = {
        side: found.model_copy(update={"revision": key[:12], "key": checksum([key, side])})
        for side, found in outcome.encoders.items()
    }
    if outcome.history:
        write_json(partial / METRICS, outcome.history)
        draw(outcome.history, stage.label, partial / CURVES)
    if outcome.pair:
        encoders = context.encoders | trained
        query, document = (
            encoders[side].spec(role, f"space-{key[:16]}") for role, side in outcome.pair.items()
        )
        pair = Pair(
            name=recipe.name,
            description=recipe.description or f"trained by the recipe {recipe.name}",
            folder=Path(),
            query=query,
            document=document,
        )
        write_pair(pair, partial / PAIR)
    _write_recipe(partial / RECIPE, recipe)

    def place(path: Path) -> Path:
        # Paths in this folder are renamed with it; that of a base model elsewhere is not.
        inside = path.is_relative_to(partial)
        return Path(os.path.relpath(folder / path.relative_to(partial) if inside else path, out))

    files = stage.files(context)
    result = {
        "key": key,
        "name": stage.label,
        "seed": stage.run_seed(context),
        "inputs": dict(inputs),
        "files": dict(zip(map(str, files), checksums(files), strict=True)),
        "counts": outcome.counts,
        "encoders": {side: e.moved(place).model_dump(mode="json") for side, e in trained.items()},
        "seconds": round(seconds, 1),
        **environment(),
    }
    write_json(partial / RESULT, result)


def write_run(recipe: Recipe, seed: int, folders: Mapping[str, Path], out: Path) -> Path:
    """Writes the last pair, the resolved recipe and a summary of the stages, by name in order.

    Returns the folder of the run, which is in that of all runs, `out`.
    """
    folder = out / "runs" / f"{recipe.name}-seed{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    stages = {}
    for name, stage in folders.items():
        result = read_json(stage / RESULT)
        stages[name] = {
            "folder": os.path.relpath(stage, folder),
            "seconds": result["seconds"],
            "counts": result["counts"],
            "last": last_measures(stage),
        }
        if (stage / PAIR).is_file():
            pair = load_pair(str(stage / PAIR)).model_copy(update={"name": recipe.name})
            write_pair(pair, folder / PAIR)
    _write_recipe(folder / RECIPE, recipe.model_copy(update={"seeds": [seed]}))
    write_json(folder / "summary.json", {"seed": seed, "stages": stages})
    return folder


def last_measures(folder: Path) -> dict[str, float]:
    """Returns the last value of the loss and of each measure of a finished stage."""
    if not (folder / METRICS).is_file():
        return {}
    last: dict[str, float] = {}
    for entry in read_json(folder / METRICS):
        last |= {k: v for k, v in entry.items() if k == _LOSS or k.startswith("dev_")}
    return {name: round(value, 4) for name, value in last.items()}


def draw(history: Sequence[Mapping[str, float]], title: str, path: Path) -> None:
    """Draws the loss with its parts, and nDCG@10 on the dev questions if it was measured."""
    losses = [name for entry in history if _LOSS in entry for name in entry]
    names = [name for name in dict.fromkeys(losses) if name not in _NOT_DRAWN]
    panels = [names, *([[_MEASURE]] if any(_MEASURE in entry for entry in history) else [])]
    figure = Figure(figsize=(5 * len(panels), 3.5), layout="constrained")
    for axes, shown in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for name in shown:
            points = [(entry["step"], entry[name]) for entry in history if name in entry]
            axes.plot(*zip(*points, strict=True), marker=".", label=name)
        axes.set_xlabel("step")
        axes.legend()
        axes.grid(alpha=0.3)
    figure.suptitle(title)
    figure.savefig(path, dpi=100)


def _write_recipe(path: Path, recipe: Recipe) -> None:
    resolved = recipe.model_dump(mode="json")
    write_text(path, yaml.safe_dump(resolved, allow_unicode=True, sort_keys=False))
