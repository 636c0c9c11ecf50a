"""Trains pairs of encoders by recipes: `python -m models.training --help`."""

import argparse
import sys
from functools import partial
from pathlib import Path

from core.errors import CareError, TrainingError
from models.training.recipe import load_recipe

_DEFAULT_OUT = Path("builds/training")


def main() -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m models.training", description="Trains pairs of encoders by recipes."
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    command = commands.add_parser("run", help="run a recipe, or go on where it was cut off")
    command.add_argument("recipe", type=Path, help="a YAML file")
    command.add_argument(
        "--set",
        action="append",
        default=[],
        dest="changes",
        metavar="KEY=VALUE",
        help="change a key of the recipe: stages.align.epochs=2; may come several times",
    )
    command.add_argument(
        "--out",
        type=Path,
        default=_DEFAULT_OUT,
        help=f"folder of stages and results, shared between recipes ({_DEFAULT_OUT})",
    )
    command.set_defaults(act=_run)
    command = commands.add_parser("phrases", help="make texts for a recipe's alignment")
    command.add_argument("recipe", type=Path, help="a YAML file, for the examples it trains on")
    command.add_argument("--out", type=Path, required=True, help="a JSONL file of texts")
    command.add_argument("--count", type=int, default=140_000, help="how many (140000)")
    command.add_argument("--seed", type=int, default=0, help="of all that is drawn (0)")
    command.add_argument(
        "--lengths",
        type=int,
        nargs=2,
        default=(4, 60),
        metavar=("MIN", "MAX"),
        help="characters of the shortest text and of the longest (4 60)",
    )
    command.add_argument("--set", action="append", default=[], dest="changes", metavar="KEY=VALUE")
    command.set_defaults(act=_phrases)
    command = commands.add_parser("ablations", help="run all ablations and baselines of CARE")
    command.add_argument("--data", type=Path, required=True, help="a BEIR folder: medical-qa-zh")
    command.add_argument("--out", type=Path, default=Path("builds/ablations"))
    command.add_argument("--seeds", type=int, default=3, help="how many, from 0 (3)")
    command.add_argument("--only", nargs="+", default=[], metavar="NAME", help="recipes to run")
    command.set_defaults(act=_ablations)
    arguments = parser.parse_args()
    try:
        arguments.act(arguments)
    except CareError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _run(arguments: argparse.Namespace) -> None:
    recipe = load_recipe(arguments.recipe, arguments.changes)
    # A wrong recipe is told at once: what follows takes seconds to load.
    from models.training.processes import processes
    from models.training.run import run

    _quieten()
    main_process = processes().is_main_process
    for seed in recipe.seeds:
        folder = run(recipe, arguments.out, seed, print if main_process else _say_nothing)
        if main_process:
            print(f"wrote {folder}", flush=True)


def _phrases(arguments: argparse.Namespace) -> None:
    if arguments.count < 1:
        raise TrainingError(f"--count: {arguments.count} is less than 1")
    shortest, longest = arguments.lengths
    if not 1 <= shortest <= longest:
        raise TrainingError(f"--lengths: {shortest} {longest}: give the shorter one first, from 1")
    recipe = load_recipe(arguments.recipe, arguments.changes)
    from models.training.phrases import write

    write(
        recipe,
        arguments.out,
        count=arguments.count,
        seed=arguments.seed,
        lengths=(shortest, longest),
    )
    print(f"wrote {arguments.out}", flush=True)


def _ablations(arguments: argparse.Namespace) -> None:
    from models.training.ablations import run_ablations

    _quieten()
    table = run_ablations(
        arguments.data, arguments.out, arguments.seeds, arguments.only, partial(print, flush=True)
    )
    print(table.read_text(encoding="utf-8"), end="")


def _quieten() -> None:
    import transformers

    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    # Bars for loading a checkpoint; training has its own.
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def _say_nothing(line: str) -> None:
    """The report of processes that are not the main one."""


if __name__ == "__main__":
    sys.exit(main())
