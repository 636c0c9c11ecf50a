"""Runs a recipe: each stage in a folder of its own, resumed if it was cut off, reused if whole.

OUT/starts/…                 checkpoints made from starts
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

import hashlib
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from core.errors import TrainingError
from core.files import exclusive, sha256_file, write_text
from core.types import Role
from models.training.curves import draw
from models.training.data import entry_files, read_dev
from models.training.encoder import Side
from models.training.folders import publish, writing
from models.training.processes import processes
from models.training.recipe import (
    SOURCES,
    Align,
    Derive,
    Distill,
    EncoderStart,
    Fit,
    Mine,
    Recipe,
    Stage,
    Teacher,
    stage_name,
)
from models.training.stages import (
    TRIPLES,
    Context,
    Outcome,
    run_stage,
    sides_read,
    teacher_name,
)
from models.training.starts import prepare
from models.training.trainer import CHECKPOINTS, check_arguments

Report = Callable[[str], None]

RESULT, METRICS, PAIR = "result.json", "metrics.json", "pair.toml"
# Raised when stages come to compute something else from the same settings.
_VERSION = 1
_LIBRARIES = ("torch", "transformers", "sentence-transformers", "accelerate", "peft")
# Settings that change no result; the seed is named by itself.
_ASIDE = {"name", "log_every", "checkpoint_every", "seed"}


@dataclass
class _Progress:
    """What the stages so far have left: encoders, and folders by the names of stages."""

    sides: dict[Role, Side]
    vectors: dict[str, Path] = field(default_factory=dict)
    mined: dict[str, Path] = field(default_factory=dict)
    results: dict[str, Path] = field(default_factory=dict)


def run(recipe: Recipe, out: Path, seed: int, report: Report) -> Path:
    """Runs a recipe with one seed.

    Args:
        recipe: The recipe.
        out: Where everything is written; runs with the same folder share finished stages.
        seed: Seed of all that is drawn.
        report: Called with each line of progress.

    Returns:
        The folder of the run.

    Raises:
        CareError: If data, a start or a setting is wrong, or the disk fails.
    """
    with writing(out):
        return _run(recipe, out, seed, report)


def _run(recipe: Recipe, out: Path, seed: int, report: Report) -> Path:
    _check(recipe)
    main = processes().is_main_process
    sides: dict[Role, Side] = {}
    # One process makes what all read.
    with processes().main_process_first():
        (out / "stages").mkdir(parents=True, exist_ok=True)
        for role, start in _starts(recipe).items():
            sides[role] = prepare(start, role, out / "starts")
    dev_set = read_dev(recipe.dev) if recipe.dev else None
    held_out = frozenset(dev_set.queries.values() if dev_set else ())
    checksum = hashlib.sha256(json.dumps(sorted(held_out)).encode()).hexdigest()
    progress = _Progress(sides)
    for stage in recipe.stages:
        name = stage_name(stage)
        stage = _with_teacher_data(stage, recipe)
        stage_seed = getattr(stage, "seed", None)
        stage_seed = seed if stage_seed is None else stage_seed
        key, inputs = _key(stage, stage_seed, recipe, checksum, progress)
        folder = out / "stages" / f"{name}-{key[:12]}"
        if (folder / RESULT).is_file():
            report(f"{name}: reused {folder}")
        else:
            report(f"{name}: {folder}")
            context = Context(
                stage=stage,
                seed=stage_seed,
                sides=dict(progress.sides),
                folder=folder.with_name(f".{folder.name}.partial"),
                cache=out / "vectors",
                dev=recipe.dev,
                dev_set=dev_set,
                held_out=held_out,
                mined=dict(progress.mined),
                vectors=dict(progress.vectors),
            )
            _run_stage(context, recipe, key, inputs, folder, out)
        _take_over(progress, name, stage, folder, out)
        if main and (last := _last_measures(folder)):
            report(f"{name}: {last}")
    return _write_run(recipe, seed, progress, out) if main else out


def _starts(recipe: Recipe) -> dict[Role, EncoderStart]:
    starts: dict[Role, EncoderStart | None] = {"query": recipe.query, "document": recipe.document}
    return {role: start for role, start in starts.items() if start is not None}


def _check(recipe: Recipe) -> None:
    """Says what a stage lacks before the stages ahead of it have been trained.

    Raises:
        TrainingError: If an encoder, a stage, a file or an argument that is named is not there.
    """
    vectors: dict[str, Path] = {}
    mined: dict[str, Path] = {}
    for stage in recipe.stages:
        name = stage_name(stage)
        for role in sides_read(stage):
            if role not in _starts(recipe):
                raise TrainingError(f"{role}: stage '{name}' needs this encoder")
        if isinstance(stage, Distill) or (isinstance(stage, Align) and not stage.vectors):
            teacher_name(stage, vectors)
        if isinstance(stage, Fit):
            check_arguments(stage)
        for entry in stage.data:
            files = entry_files(entry, mined)
            if entry.mined is None:
                _checksums(files)
        if isinstance(stage, Teacher):
            vectors[name] = Path()
        if isinstance(stage, Mine):
            mined[name] = Path()


def _run_stage(
    context: Context,
    recipe: Recipe,
    key: str,
    inputs: dict[str, Any],
    folder: Path,
    out: Path,
) -> None:
    state = processes()
    partial = context.folder
    with writing(partial):
        partial.mkdir(exist_ok=True)
        if not state.is_main_process:
            run_stage(context)
        else:
            with exclusive(partial):
                _clear(partial)
                started = time.monotonic()
                outcome = run_stage(context)
                _write_result(context, recipe, key, inputs, outcome, folder, out, started)
                shutil.rmtree(partial / CHECKPOINTS, ignore_errors=True)
                (partial / ".lock").unlink()
                publish(partial, folder)
        state.wait_for_everyone()


def _clear(partial: Path) -> None:
    """Deletes what a stage writes at its end: an earlier command may have been cut off there."""
    for role in ("query", "document"):
        shutil.rmtree(partial / role, ignore_errors=True)
    for name in (RESULT, METRICS, PAIR, "recipe.yaml", "curves.png", TRIPLES):
        (partial / name).unlink(missing_ok=True)


def _write_result(
    context: Context,
    recipe: Recipe,
    key: str,
    inputs: dict[str, Any],
    outcome: Outcome,
    folder: Path,
    out: Path,
    started: float,
) -> None:
    partial = context.folder
    # A base that lies elsewhere keeps its place; what lies here will be renamed with the folder.
    trained = {
        role: replace(
            _moved(side, partial, folder),
            revision=key[:12],
            key=hashlib.sha256(f"{key} {role}".encode()).hexdigest(),
        )
        for role, side in outcome.sides.items()
    }
    if outcome.history:
        write_text(partial / METRICS, json.dumps(outcome.history, indent=1) + "\n")
        draw(outcome.history, stage_name(context.stage), partial / "curves.png")
    if outcome.pair:
        sides = dict(context.sides) | trained
        encoders = {role: sides[side] for role, side in outcome.pair.items()}
        text = describe_pair(recipe.name, recipe.description, f"space-{key[:16]}", encoders, folder)
        write_text(partial / PAIR, text)
    resolved = recipe.model_dump(mode="json")
    write_text(
        partial / "recipe.yaml", yaml.safe_dump(resolved, allow_unicode=True, sort_keys=False)
    )
    result = {
        "key": key,
        "name": stage_name(context.stage),
        "seed": context.seed,
        "inputs": inputs,
        "counts": outcome.counts,
        "sides": {role: _as_json(side, out) for role, side in trained.items()},
        "seconds": round(time.monotonic() - started, 1),
        "python": platform.python_version(),
        "libraries": {name: version(name) for name in _LIBRARIES},
    }
    write_text(partial / RESULT, json.dumps(result, indent=1, ensure_ascii=False) + "\n")


def describe_pair(
    name: str,
    description: str,
    embedding_space: str,
    encoders: Mapping[Role, Side],
    folder: Path,
) -> str:
    """Returns the TOML text of a pair; paths in it are relative to a folder.

    Args:
        name: The pair's name.
        description: One sentence.
        embedding_space: Identity of the space that both encoders share.
        encoders: The encoder of each role.
        folder: Where the file will lie.
    """
    lines = [
        f"name = {_toml(name)}",
        f"description = {_toml(description or f'trained by the recipe {name}')}",
        f"embedding_space = {_toml(embedding_space)}",
    ]
    for role in ("query", "document"):
        spec = encoders[role].spec(role, embedding_space)
        facts = spec.model_dump(exclude={"role", "embedding_space"}, exclude_defaults=True)
        # A default of the model is left out, a field that it needs never has one.
        facts |= {"weights": _relative(encoders[role].folder, folder)}
        if adapter := encoders[role].adapter:
            facts |= {"adapter": _relative(adapter, folder)}
        lines += ["", f"[{role}]", *(f"{key} = {_toml(value)}" for key, value in facts.items())]
    return "\n".join([*lines, ""])


def _with_teacher_data(stage: Stage, recipe: Recipe) -> Stage:
    """Gives a stage of alignment that names no data that of its teacher."""
    if not isinstance(stage, Align) or stage.data:
        return stage
    before = recipe.stages[: [stage_name(s) for s in recipe.stages].index(stage_name(stage))]
    teachers = {stage_name(s): s for s in before if isinstance(s, Teacher)}
    name = teacher_name(stage, teachers)
    return stage.model_copy(update={"data": teachers[name].data})


def _key(
    stage: Stage, seed: int, recipe: Recipe, held_out: str, progress: _Progress
) -> tuple[str, dict[str, Any]]:
    """Returns a checksum of all that a stage's result depends on, and its parts."""
    deterministic = isinstance(stage, Teacher | Mine | Derive)
    files = [path for entry in stage.data for path in entry_files(entry, progress.mined)]
    inputs: dict[str, Any] = {
        "version": _VERSION,
        "stage": _settings(stage),
        "sides": {role: progress.sides[role].key for role in sides_read(stage)},
        "data": _checksums(files),
        "held_out": held_out,
    }
    if not deterministic:
        inputs["seed"] = seed
        if recipe.dev:
            inputs["measured"] = recipe.dev.model_dump(mode="json", exclude={"beir"})
            inputs["dev"] = _checksums(entry_files(recipe.dev, {}))
    if isinstance(stage, Align) and stage.vectors:
        inputs["vectors"] = _checksums([Path(stage.vectors) / "journal.jsonl"])
    elif isinstance(stage, Align | Distill):
        teacher = progress.vectors[teacher_name(stage, progress.vectors)]
        inputs["vectors"] = _read_json(teacher / RESULT)["key"]
        inputs["stage"].pop("teacher")
    text = json.dumps(inputs, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest(), inputs


def _settings(stage: Stage) -> dict[str, Any]:
    """Returns the settings that a result depends on: where data lie is not among them."""
    settings = stage.model_dump(mode="json", exclude=_ASIDE)
    for entry in settings.get("data", []):
        for source in SOURCES:
            entry[source] = entry[source] is not None
    return settings


def _checksums(files: list[Path]) -> dict[str, str]:
    try:
        # By their names alone: the same data in another place is the same data.
        return {
            f"{path.parent.name}/{path.name}": _sha256(path, path.stat().st_mtime_ns)
            for path in files
        }
    except OSError as error:
        raise TrainingError(f"{error.filename} cannot be read: {error.strerror}") from error


@cache
def _sha256(path: Path, changed: int) -> str:
    return sha256_file(path)


def _take_over(progress: _Progress, name: str, stage: Stage, folder: Path, out: Path) -> None:
    result = _read_json(folder / RESULT)
    for role, facts in result["sides"].items():
        progress.sides[role] = _from_json(facts, out)
    progress.results[name] = folder
    if isinstance(stage, Teacher):
        progress.vectors[name] = folder
    if isinstance(stage, Mine):
        progress.mined[name] = folder / TRIPLES


def _write_run(recipe: Recipe, seed: int, progress: _Progress, out: Path) -> Path:
    folder = out / "runs" / f"{recipe.name}-seed{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    stages = {}
    for name, result in progress.results.items():
        facts = _read_json(result / RESULT)
        stages[name] = {
            "folder": os.path.relpath(result, folder),
            "seconds": facts["seconds"],
            "counts": facts["counts"],
            "last": _last_measures(result),
        }
        if (result / PAIR).is_file():
            text = (result / PAIR).read_text(encoding="utf-8")
            write_text(folder / PAIR, _moved_pair(text, recipe, result, folder))
    resolved = recipe.model_copy(update={"seeds": [seed]}).model_dump(mode="json")
    text = yaml.safe_dump(resolved, allow_unicode=True, sort_keys=False)
    write_text(folder / "recipe.yaml", text)
    write_text(folder / "summary.json", json.dumps({"seed": seed, "stages": stages}, indent=1))
    return folder


def _moved_pair(text: str, recipe: Recipe, source: Path, folder: Path) -> str:
    """Returns a stage's pair under the recipe's name, with paths relative to another folder."""
    lines = []
    for line in text.splitlines():
        key, _, value = line.partition(" = ")
        if key == "name":
            line = f"name = {_toml(recipe.name)}"
        elif key in ("weights", "adapter"):
            line = f"{key} = {_toml(_relative(source / json.loads(value), folder))}"
        lines.append(line)
    return "\n".join([*lines, ""])


def _last_measures(folder: Path) -> dict[str, float]:
    """Returns the last value of each measure of a stage."""
    if not (folder / METRICS).is_file():
        return {}
    last: dict[str, float] = {}
    for entry in _read_json(folder / METRICS):
        last |= {k: v for k, v in entry.items() if k == "loss" or k.startswith("dev_")}
    return {name: round(value, 4) for name, value in last.items()}


def _moved(side: Side, source: Path, target: Path) -> Side:
    def move(path: Path) -> Path:
        return target / path.relative_to(source) if path.is_relative_to(source) else path

    return replace(
        side, folder=move(side.folder), adapter=move(side.adapter) if side.adapter else None
    )


def _as_json(side: Side, out: Path) -> dict[str, Any]:
    return {
        "folder": os.path.relpath(side.folder, out),
        "adapter": os.path.relpath(side.adapter, out) if side.adapter else None,
        "start": side.start.model_dump(mode="json"),
        "native_dimension": side.native_dimension,
        "model": side.model,
        "revision": side.revision,
        "key": side.key,
    }


def _from_json(facts: dict[str, Any], out: Path) -> Side:
    adapter = facts["adapter"]
    return Side(
        folder=out / facts["folder"],
        adapter=out / adapter if adapter else None,
        start=EncoderStart.model_validate(facts["start"]),
        native_dimension=facts["native_dimension"],
        model=facts["model"],
        revision=facts["revision"],
        key=facts["key"],
    )


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _relative(path: Path, folder: Path) -> str:
    return Path(os.path.relpath(path, folder)).as_posix()


def _toml(value: str | int | bool) -> str:
    # A string of JSON is a basic string of TOML; so are its numbers and truth values.
    return json.dumps(value, ensure_ascii=False)
