"""Trains pairs of encoders by recipes: `python -m training --help`."""

import argparse
import sys
from functools import partial
from pathlib import Path

from core import cli
from training.errors import TrainingError
from training.files import PAIR
from training.recipe import load_recipe

_DEFAULT_OUT = Path("builds/training")


def main() -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m training", description="Trains pairs of encoders by recipes."
    )
    recipe = argparse.ArgumentParser(add_help=False)
    recipe.add_argument("recipe", type=Path, help="a YAML file")
    recipe.add_argument(
        "--set",
        action="append",
        default=[],
        dest="changes",
        metavar="KEY=VALUE",
        help="change a key of the recipe: stages.align.epochs=2; may come several times",
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    command = commands.add_parser("run", parents=[recipe], help="run a recipe, or resume a run")
    shared = f"folder of stages and results, shared between recipes ({_DEFAULT_OUT})"
    command.add_argument("--out", type=Path, default=_DEFAULT_OUT, help=shared)
    command.set_defaults(act=_run)
    command = commands.add_parser("phrases", parents=[recipe], help="make texts for alignment")
    command.add_argument("--out", type=Path, required=True, help="a JSONL file of texts")
    command.add_argument("--count", type=cli.positive_int, default=140_000, help="(140000)")
    command.add_argument("--seed", type=cli.whole_number, default=0, help="of all draws (0)")
    command.add_argument(
        "--lengths",
        type=cli.positive_int,
        nargs=2,
        default=(4, 60),
        metavar=("MIN", "MAX"),
        help="characters of the shortest text and of the longest (4 60)",
    )
    command.set_defaults(act=_phrases)
    command = commands.add_parser("ablations", help="run all ablations and baselines of CARE")
    command.add_argument("--data", type=Path, required=True, help="a BEIR folder: medical-qa-zh")
    command.add_argument("--out", type=Path, default=Path("builds/ablations"))
    command.add_argument("--seeds", type=cli.positive_int, default=3, help="how many, from 0 (3)")
    command.add_argument("--only", nargs="+", default=[], metavar="NAME", help="recipes to run")
    command.set_defaults(act=_ablations)
    arguments = parser.parse_args()
    interrupted = "interrupted; the same command resumes"
    return cli.run(lambda: arguments.act(arguments), interrupted=interrupted)


def _run(arguments: argparse.Namespace) -> None:
    recipe = load_recipe(arguments.recipe, arguments.changes)
    # A wrong recipe is reported at once: what follows takes seconds to load.
    from training.distributed import processes
    from training.run import run

    _silence_transformers_logging()

    def report(line: str) -> None:
        if processes().is_main_process:
            print(line, flush=True)

    for seed in recipe.seeds:
        folder = run(recipe, arguments.out, seed, report)
        report(f"wrote {folder}")
        if (folder / PAIR).is_file():
            exported = f"builds/export/{recipe.name}"
            build = f"indexer build --pair {exported}/pair.toml --index NAME --corpus FILE"
            report(f"next: make export PAIR={folder / PAIR} OUT={exported}")
            # Documents are encoded by torch, which this Python has.
            report(f"then: {sys.executable} -m {build}")


def _phrases(arguments: argparse.Namespace) -> None:
    shortest, longest = arguments.lengths
    if shortest > longest:
        reason = f"{shortest} {longest}: give the shorter one first"
        raise TrainingError.at("--lengths", reason, "invalid_lengths")
    recipe = load_recipe(arguments.recipe, arguments.changes)
    from training.experiments.phrases import write

    write(recipe, arguments.out, arguments.count, arguments.seed, (shortest, longest))
    print(f"wrote {arguments.out}", flush=True)


def _ablations(arguments: argparse.Namespace) -> None:
    from training.experiments.ablations import run_ablations

    _silence_transformers_logging()
    data, out, show = arguments.data, arguments.out, partial(print, flush=True)
    table = run_ablations(data, out, arguments.seeds, arguments.only, show)
    print(table.read_text(encoding="utf-8"), end="")


def _silence_transformers_logging() -> None:
    import transformers

    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    # Bars for loading a checkpoint; training has its own.
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    sys.exit(main())
