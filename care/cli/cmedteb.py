"""`care cmedteb`: systems scored on CMedTEB, compared and reported."""

from pathlib import Path
from typing import Annotated

import typer

from care.cli.options import Json
from care.cli.output import note, print_lines, show
from care.extras import require
from core.choices import DEFAULT_PAIR

app = typer.Typer(
    no_args_is_help=True,
    help="Score pairs on CMedTEB, compare and report them, plot accuracy against speed.",
)

_DEFAULT_CACHE = Path("builds/embeddings")

Systems = Annotated[
    list[str] | None,
    typer.Option(
        "--system",
        metavar="SYSTEM",
        help="Trained or registered pair, path of a pair's .toml file, bm25 (words) or "
        "bm25-characters (characters and bigrams). May be repeated.",
        show_default=DEFAULT_PAIR,
    ),
]
Data = Annotated[
    str, typer.Option(metavar="FOLDER", help="Folder of the data, or hub for the Hugging Face Hub.")
]
Hub = Annotated[
    str | None,
    typer.Option(
        metavar="OWNER/NAME", help="With --data hub: data sets OWNER/NAME-retrieval, -rerank, -sts."
    ),
]
Split = Annotated[
    str, typer.Option(metavar="SPLIT", help="Split of the retrieval data in a folder.")
]
Instructions = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="TOML file of instructions by task, for encoders that have one."
    ),
]
Out = Annotated[Path, typer.Option(metavar="FOLDER", help="Folder of results.")]
Cache = Annotated[Path, typer.Option(metavar="FOLDER", help="Folder of cached vectors.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Texts per batch of the encoder.")]


@app.command()
def run(
    data: Data,
    out: Out,
    systems: Systems = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            "--task",
            metavar="TASK",
            help="Only this task. May be repeated.",
            show_default="all tasks of the data",
        ),
    ] = None,
    hub: Hub = None,
    split: Split = "test",
    instructions: Instructions = None,
    cache: Cache = _DEFAULT_CACHE,
    batch_size: BatchSize = 32,
    json_: Json = False,
) -> None:
    """Score systems on the tasks, and write the runs and the table of all systems."""
    _require()
    from evaluation.cmedteb.benchmark import TABLE, load_systems, run_benchmark
    from evaluation.cmedteb.results import read_scores
    from evaluation.cmedteb.tasks import TASKS, find_tasks, read_instructions

    own = read_instructions(instructions) if instructions else None
    found = find_tasks(data, split, hub, tasks or [], own)
    held = {known.name for known in found}
    missing = [known.name for known in TASKS if known.name not in held]
    if missing and not tasks:
        note(f"{data} does not hold {', '.join(missing)}")
    table = run_benchmark(
        load_systems(
            systems or [DEFAULT_PAIR], cache, instructions=instructions, batch_size=batch_size
        ),
        found,
        out,
    )
    scores = {
        system: {task: score.value for task, score in by_task.items()}
        for system, by_task in read_scores(out).items()
    }
    lines = [*table.split("\n"), f"wrote {out / TABLE}; runs and scores are in {out}/SYSTEM/"]
    show({"scores": scores, "table": out / TABLE}, lines, as_json=json_)


@app.command()
def report(
    data: Data,
    out: Out,
    hub: Hub = None,
    split: Split = "test",
    failures: Annotated[
        int, typer.Option(min=1, help="Queries shown for each system and task, at most.")
    ] = 50,
) -> None:
    """Write the HTML report of all scores."""
    _require()
    from evaluation.cmedteb.report import write_report
    from evaluation.cmedteb.tasks import find_tasks

    path = write_report(out, find_tasks(data, split, hub), failures=failures)
    print_lines([f"wrote {path}"])


@app.command()
def compare(
    first: Annotated[str, typer.Argument(metavar="FIRST", help="Name of a scored system.")],
    second: Annotated[str, typer.Argument(metavar="SECOND", help="Name of another scored system.")],
    out: Out,
) -> None:
    """Test the differences between the scores of two systems."""
    _require()
    from evaluation.cmedteb.results import compare_systems

    print_lines(compare_systems(out, first, second).rstrip().split("\n"))


@app.command()
def tradeoff(
    systems: Annotated[
        list[str],
        typer.Option(
            "--system",
            metavar="SYSTEM",
            help="Registered pair, path of a pair's .toml file, bm25 (words) or bm25-characters "
            "(characters and bigrams). May be repeated.",
        ),
    ],
    data: Data,
    out: Out,
    hub: Hub = None,
    split: Split = "test",
    instructions: Instructions = None,
    cache: Cache = _DEFAULT_CACHE,
    batch_size: BatchSize = 32,
) -> None:
    """Plot nDCG@10 against queries per second."""
    _require()
    from evaluation.cmedteb.benchmark import load_systems
    from evaluation.cmedteb.tasks import find_tasks, read_instructions
    from evaluation.cmedteb.tradeoff import measure_tradeoff

    own = read_instructions(instructions) if instructions else None
    tasks = find_tasks(data, split, hub, ["retrieval"], own)
    loaded = load_systems(systems, cache, instructions=instructions, batch_size=batch_size)
    table = measure_tradeoff(loaded, tasks, out)
    print_lines([*table.split("\n"), f"wrote {out}/tradeoff.md, .json, .png and .svg"])


@app.command()
def splits(
    data: Annotated[Path, typer.Option(metavar="FOLDER", help="BEIR folder, as of care splits.")],
    splits: Annotated[
        list[str],
        typer.Option("--split", metavar="SPLIT", help="Split of the folder. May be repeated."),
    ],
    out: Out,
    systems: Systems = None,
    instructions: Instructions = None,
    cache: Cache = _DEFAULT_CACHE,
    batch_size: BatchSize = 32,
    json_: Json = False,
) -> None:
    """Compare systems on splits of one corpus: nDCG@10, speed and size of the query side.

    Differences are to the first system.
    """
    _require()
    from evaluation.cmedteb.benchmark import load_systems
    from evaluation.cmedteb.splits import compare_on_splits
    from evaluation.cmedteb.tasks import read_instructions

    own = read_instructions(instructions) if instructions else None
    loaded = load_systems(
        systems or [DEFAULT_PAIR], cache, instructions=instructions, batch_size=batch_size
    )
    result, table = compare_on_splits(loaded, data, splits, out, own)
    lines = [*table.rstrip().split("\n"), f"wrote {out}/splits.md and .json"]
    show(result, lines, as_json=json_)


def _require() -> None:
    require("cmedteb", "eval", make="cmedteb")
