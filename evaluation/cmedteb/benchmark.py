"""Runs systems on the tasks and writes the table."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from core.errors import CareError
from core.files import write_text
from core.progress import write_above
from evaluation.bm25 import SYSTEMS
from evaluation.cmedteb.evaluate import (
    Bm25Model,
    Load,
    PairModel,
    System,
    evaluate_task,
    takes_instruction,
)
from evaluation.cmedteb.results import markdown_table, read_scores
from evaluation.cmedteb.tasks import Task, TaskData
from models.encoders.factory import load_encoder
from models.pairs import load_pair

TABLE = "table.md"


def load_systems(
    names: Sequence[str],
    cache: Path,
    *,
    instructions: Path | None = None,
    batch_size: int = 32,
    load: Load = load_encoder,
) -> list[System]:
    """Returns the systems with these names.

    With the instructions of a file, a pair that takes instructions is the system PAIR+FILE, so
    that its scores are kept beside those with other instructions.

    Args:
        names: Registered pairs, paths of pairs' TOML files, or names of `evaluation.bm25.SYSTEMS`.
        cache: Folder in which the vectors of pairs are kept.
        instructions: File of the tasks' instructions; None for those of the benchmark.
        batch_size: Texts that an encoder encodes at once.
        load: Loads one side of a pair.
    """
    systems: dict[str, System] = {}
    for given in names:
        system: System
        if given in SYSTEMS:
            system = Bm25Model(given)
        else:
            pair = load_pair(given)
            name = pair.name
            if instructions and takes_instruction(pair.query):
                name += f"+{instructions.stem}"
            system = PairModel(pair, cache, batch_size=batch_size, load=load, name=name)
        name = system.name
        if not re.fullmatch(r"\w[\w.+-]*", name):
            message = (
                f"{given}: the system name '{name}' cannot be a folder name: use letters, digits, "
                "'.', '_', '+' and '-'"
            )
            raise CareError(message, code="bad_system_name", system=name)
        if name in systems:
            message = f"{given}: another system has the name '{name}' too: rename one"
            raise CareError(message, code="duplicate_system", system=name)
        systems[name] = system
    return list(systems.values())


def run_benchmark(
    systems: Sequence[System], tasks: Mapping[Task, Callable[[], TaskData]], out: Path
) -> str:
    """Scores each system on each task and returns the table of all systems in `out`.

    Writes `SYSTEM/TASK.json`, `SYSTEM/TASK.trec` and `table.md`; scores of earlier runs are kept.
    """
    for system in systems:
        for known, read in tasks.items():
            write_above(f"{system.name}: {known.column} …")
            evaluate_task(system, known, read(), out)
    table = markdown_table(read_scores(out))
    write_text(out / TABLE, table)
    return table
