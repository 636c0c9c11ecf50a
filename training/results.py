"""Output files of stages and runs; `training.run` describes the layout."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from matplotlib.figure import Figure

from core.encoders import Pair
from core.files import relative_path, remove_temporary, write_text
from core.provenance import environment
from core.records import write_json
from models.pairs import load_pair, write_pair
from training.files import (
    CURVES,
    METRICS,
    PAIR,
    RECIPE,
    RESULT,
    TOKENS,
    TRIPLES,
    checksum,
    read_json,
)
from training.recipe import Recipe
from training.stages.base import Context, Outcome, Stage, checksums

_LOSS, _MEASURE = "loss", "dev_nDCG@10"
# Entries of the history that are not plotted.
_NOT_DRAWN = {"step", "epoch", "grad_norm", "learning_rate"}


def clear(partial: Path) -> None:
    """Deletes the files that a stage writes last, in case an earlier run was interrupted there."""
    for side in ("query", "document"):
        shutil.rmtree(partial / side, ignore_errors=True)
    for name in (RESULT, METRICS, PAIR, RECIPE, CURVES, TRIPLES, TOKENS):
        (partial / name).unlink(missing_ok=True)
    remove_temporary(partial)


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
    """Writes the result of a stage, whose key is the checksum of `inputs`, into `partial`.

    It is renamed to `folder` afterwards.
    """
    key, out = checksum(inputs), folder.parent.parent
    trained = {
        side: found.model_copy(
            update={"revision": key[:12], "graph": None, "key": checksum([key, side])}
        )
        for side, found in outcome.encoders.items()
    }
    if outcome.history:
        write_json(partial / METRICS, outcome.history)
        draw(outcome.history, stage.label, partial / CURVES)
    if outcome.pair:
        encoders = context.encoders | trained
        sides = {role: encoders[side] for role, side in outcome.pair.items()}
        # A document encoder that no stage changed keeps its graph and its embedding space, so
        # indexes of its pair can be searched with the trained query encoder.
        graph = sides["document"].graph
        space = graph.embedding_space if graph else f"space-{key[:16]}"
        query = sides["query"].spec("query", space)
        document = graph or sides["document"].spec("document", space)
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
        # `partial` is renamed to `folder`; a base model may be in another folder.
        inside = path.is_relative_to(partial)
        return relative_path(folder / path.relative_to(partial) if inside else path, out)

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


def write_run(recipe: Recipe, seed: int, folders: Mapping[str, Path], folder: Path) -> None:
    """Writes the last pair and projections, the resolved recipe and a summary into a new `folder`.

    `folders` are those of the stages, by name in the order of the recipe.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stages = {}
    for name, stage in folders.items():
        result = read_json(stage / RESULT)
        stages[name] = {
            "folder": str(relative_path(stage, folder)),
            "seconds": result["seconds"],
            "counts": result["counts"],
            "last": last_measures(stage),
        }
        if (stage / PAIR).is_file():
            pair = load_pair(str(stage / PAIR)).model_copy(update={"name": recipe.name})
            write_pair(pair, folder / PAIR)
        if (stage / TOKENS).is_file():
            shutil.copyfile(stage / TOKENS, folder / TOKENS)
    _write_recipe(folder / RECIPE, recipe.model_copy(update={"seeds": [seed]}))
    write_json(folder / "summary.json", {"seed": seed, "stages": stages})


def last_measures(folder: Path) -> dict[str, float]:
    """Returns the last loss and dev metrics of a finished stage."""
    if not (folder / METRICS).is_file():
        return {}
    last: dict[str, float] = {}
    for entry in read_json(folder / METRICS):
        last |= {k: v for k, v in entry.items() if k == _LOSS or k.startswith("dev_")}
    return {name: round(value, 4) for name, value in last.items()}


def draw(history: Sequence[Mapping[str, float]], title: str, path: Path) -> None:
    """Plots the loss with its parts and, if it was measured, nDCG@10 on the development set."""
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
