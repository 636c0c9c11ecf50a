"""`care cmedteb`: systems scored on CMedTEB, compared and reported."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from care.cli.options import Json, takes_fields
from care.cli.output import note, print_lines, show
from care.extras import require
from care.options import file, folder
from core.choices import DEFAULT_PAIR

if TYPE_CHECKING:
    from evaluation.cmedteb.evaluate import System

app = typer.Typer(
    no_args_is_help=True,
    help="Score pairs on CMedTEB, compare and report them, plot accuracy against speed.",
)

Systems = Annotated[
    list[str] | None,
    Option(
        "--system",
        metavar="SYSTEM",
        help="Trained or registered pair, path of a pair's .toml file, bm25 (words) or "
        "bm25-characters (characters and bigrams). May be repeated.",
        show_default=DEFAULT_PAIR,
    ),
]
Data = Annotated[str, folder("Folder of the data, or hub for the Hugging Face Hub.")]
Hub = Annotated[
    str | None,
    Option(
        metavar="OWNER/NAME", help="With --data hub: data sets OWNER/NAME-retrieval, -rerank, -sts."
    ),
]
Split = Annotated[str, Option(metavar="SPLIT", help="Split of the retrieval data in a folder.")]
Out = Annotated[Path, folder("Folder of results.")]


@dataclass(frozen=True, slots=True)
class Encoding:
    """How systems encode texts."""

    instructions: Annotated[
        Path | None, file("TOML file of instructions by task, for encoders that have one.")
    ] = None
    cache: Annotated[Path, folder("Folder of cached vectors.")] = Path("builds/embeddings")
    batch_size: Annotated[int, Option(min=1, help="Texts per batch of the encoder.")] = 32

    def systems(self, names: Sequence[str] | None) -> "list[System]":
        """Returns the systems with these names."""
        from evaluation.cmedteb.evaluate import load_systems

        return load_systems(names or [DEFAULT_PAIR], **asdict(self))

    def by_task(self) -> Mapping[str, str] | None:
        """Reads the instructions, if there are any."""
        from evaluation.cmedteb.tasks import read_instructions

        return read_instructions(self.instructions) if self.instructions else None


@app.command()
@takes_fields
def run(
    data: Data,
    out: Out,
    systems: Systems = None,
    tasks: Annotated[
        list[str] | None,
        Option(
            "--task",
            metavar="TASK",
            help="Only this task. May be repeated.",
            show_default="all tasks of the data",
        ),
    ] = None,
    hub: Hub = None,
    split: Split = "test",
    *,
    encoding: Encoding,
    json_: Json = False,
) -> None:
    """Score systems on the tasks, and write the runs and the table of all systems."""
    _require()
    from evaluation.cmedteb.evaluate import TABLE, run_benchmark
    from evaluation.cmedteb.results import read_scores
    from evaluation.cmedteb.tasks import TASKS, find_tasks

    found = find_tasks(data, split, hub, tasks or [], encoding.by_task())
    held = {known.name for known in found}
    missing = [known.name for known in TASKS if known.name not in held]
    if missing and not tasks:
        note(f"{data} does not hold {', '.join(missing)}")
    table = run_benchmark(encoding.systems(systems), found, out)
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
        int, Option(min=1, help="Queries shown for each system and task, at most.")
    ] = 50,
) -> None:
    """Write the HTML report of all scores."""
    _require()
    from evaluation.cmedteb.results import write_report
    from evaluation.cmedteb.tasks import find_tasks

    path = write_report(out, find_tasks(data, split, hub), failures=failures)
    print_lines([f"wrote {path}"])


@app.command()
def compare(
    first: Annotated[str, Argument(metavar="FIRST", help="Name of a scored system.")],
    second: Annotated[str, Argument(metavar="SECOND", help="Name of another scored system.")],
    out: Out,
) -> None:
    """Test the differences between the scores of two systems."""
    _require()
    from evaluation.cmedteb.results import compare_systems

    print_lines(compare_systems(out, first, second).rstrip().split("\n"))


@app.command()
@takes_fields
def tradeoff(
    data: Data,
    out: Out,
    systems: Systems = None,
    hub: Hub = None,
    split: Split = "test",
    *,
    encoding: Encoding,
) -> None:
    """Plot nDCG@10 against queries per second."""
    _require()
    from evaluation.cmedteb.splits import measure_tradeoff
    from evaluation.cmedteb.tasks import find_tasks

    tasks = find_tasks(data, split, hub, ["retrieval"], encoding.by_task())
    table = measure_tradeoff(encoding.systems(systems), tasks, out)
    print_lines([*table.split("\n"), f"wrote {out}/tradeoff.md, .json, .png and .svg"])


@app.command()
@takes_fields
def splits(
    data: Annotated[Path, folder("BEIR folder, as of care splits.")],
    splits: Annotated[
        list[str], Option("--split", metavar="SPLIT", help="Split of the folder. May be repeated.")
    ],
    out: Out,
    systems: Systems = None,
    *,
    encoding: Encoding,
    json_: Json = False,
) -> None:
    """Compare systems on splits of one corpus: nDCG@10, speed and size of the query side.

    Differences are to the first system.
    """
    _require()
    from evaluation.cmedteb.splits import compare_on_splits

    own, loaded = encoding.by_task(), encoding.systems(systems)
    result, table = compare_on_splits(loaded, data, splits, out, own)
    lines = [*table.rstrip().split("\n"), f"wrote {out}/splits.md and .json"]
    show(result, lines, as_json=json_)


def _require() -> None:
    require("cmedteb", "eval", make="cmedteb")
