"""`care train`, and the maintainers' commands `ablations`, `phrases` and `splits`."""

import shlex
import sys
from collections.abc import Iterator
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from care.cli.options import Changes, Json
from care.cli.output import print_lines, program, reporter, show
from care.extras import require
from care.options import file, folder
from care.training import DEFAULT_OUT, train_seeds
from core.errors import CareError

Recipe = Annotated[Path, Argument(metavar="RECIPE", help="YAML file: see docs/train-a-pair.md.")]


def train(
    recipe: Recipe,
    changes: Changes = None,
    out: Annotated[Path, folder("Folder of stages and runs, shared by recipes.")] = DEFAULT_OUT,
    json_: Json = False,
) -> None:
    """Train a pair by a recipe, or resume an interrupted run.

    With several GPUs: torchrun --nproc-per-node 4 -m care train RECIPE
    """
    report = reporter(as_json=json_)
    # The trainer prints its losses to standard output.
    with redirect_stdout(sys.stderr) if json_ else nullcontext():
        folders = train_seeds(recipe, out=out, changes=changes or (), report=report)
    from training.distributed import processes

    if processes().is_main_process:
        lines = [line for folder in folders for line in _run_lines(folder)]
        show({"runs": [_run_facts(folder) for folder in folders]}, lines, as_json=json_)


def ablations(
    data: Annotated[Path, folder("BEIR folder with train.paraphrases.jsonl: medical-qa-zh.")],
    out: Annotated[Path, folder("Folder of runs and tables.")] = Path("builds/ablations"),
    recipes: Annotated[
        Path | None,
        folder(
            "Folder of recipes, with tables.toml for the report.",
            show_default="those of the paper's tables",
        ),
    ] = None,
    seeds: Annotated[
        int | None, Option(min=1, help="Number of seeds of each recipe to run.", show_default="all")
    ] = None,
    only: Annotated[
        str,
        Option(metavar="NAMES", help="Recipes to run, separated by commas.", show_default="all"),
    ] = "",
    train: Annotated[
        bool, Option("--train/--report", help="Run recipes, or report finished runs only.")
    ] = True,
) -> None:
    """Run the ablations and baselines of the CARE paper, and score them.

    An interrupted call resumes. Recipes share stages with equal inputs.
    """
    require("train", "eval", make="ablations")
    from care.ablation_data import write_training_data
    from training.experiments.ablations import RECIPES, run_ablations
    from training.run import silence_transformers_logging

    silence_transformers_logging()
    report = reporter(as_json=False)
    names = only.split(",") if only else []
    table = run_ablations(
        data,
        out,
        names,
        report,
        recipes=recipes or RECIPES,
        seeds=seeds,
        train=train,
        diversify=write_training_data,
    )
    report(table.read_text(encoding="utf-8").rstrip())


def phrases(
    recipe: Recipe,
    out: Annotated[Path, file("JSONL file of texts to write.")],
    changes: Changes = None,
    count: Annotated[int, Option(min=1, help="Number of texts.")] = 140_000,
    seed: Annotated[int, Option(min=0, help="Seed of all random draws.")] = 0,
    lengths: Annotated[
        tuple[int, int],
        Option(min=1, metavar="MIN MAX", help="Characters of the shortest and longest text."),
    ] = (4, 60),
) -> None:
    """Write synthetic texts for the alignment stage of a recipe."""
    shortest, longest = lengths
    if not 0 < shortest <= longest:
        message = f"--lengths {shortest} {longest}: give two numbers above 0, the smaller one first"
        raise CareError(message, code="invalid_lengths", key="--lengths")
    require("train", "eval")
    from training.experiments.phrases import write
    from training.recipe import load_recipe

    write(load_recipe(recipe, changes or []), out, count, seed, lengths)
    print_lines([f"wrote {out}"])


def splits(
    data: Annotated[Path, folder("BEIR folder with metadata source: medical-qa-zh.")],
    out: Annotated[Path, folder("BEIR folder to write.")],
    spoken: Annotated[
        Path,
        file(
            "JSONL of questions rewritten by hand; those whose original is not in the "
            "split unseen are left out."
        ),
    ] = Path("data/medical-qa-zh-spoken/queries.jsonl"),
    words: Annotated[
        Path, folder("Questions written by hand as patients speak, and queries of few words.")
    ] = Path("data/medical-qa-zh-words"),
    json_: Json = False,
) -> None:
    """Write the splits that care-mini is trained on, tuned by and measured with."""
    require("train", "eval", "curation")
    from curation.rewording import reword
    from training.experiments.splits import write_splits

    sizes = write_splits(data, out, reword, spoken=spoken, words=words)
    lines = [f"{name}: {count}" for name, count in sizes.items()]
    show({"splits": sizes, "folder": out}, [*lines, f"wrote {out}"], as_json=json_)


def _run_lines(folder: Path) -> Iterator[str]:
    from models.pairs import PAIR, load_pair, pairs_folder

    yield f"wrote {folder}"
    if (folder / PAIR).is_file():
        name = load_pair(str(folder / PAIR)).name
        pair, out = (shlex.quote(str(path)) for path in (folder / PAIR, pairs_folder() / name))
        yield f"next: {program()} export --pair {pair} --out {out} --document merged"
        yield f"then: {program()} index CORPUS --index NAME --pair {shlex.quote(name)}"


def _run_facts(folder: Path) -> dict[str, str | None]:
    from training.files import PAIR

    pair = folder / PAIR
    return {"folder": str(folder), "pair": str(pair) if pair.is_file() else None}
