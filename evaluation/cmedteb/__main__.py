"""`python -m evaluation.cmedteb`: score systems on CMedTEB, compare and report."""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from core import cli
from core.errors import CareError
from core.files import write_text
from evaluation.cmedteb.evaluate import BM25, Bm25Model, Load, PairModel, System, evaluate_task
from evaluation.cmedteb.report import html_report
from evaluation.cmedteb.results import compare, markdown_table, read_scores
from evaluation.cmedteb.tasks import TASKS, RankingData, Task, TaskData, find_tasks, task
from evaluation.cmedteb.tradeoff import measure_tradeoff
from models.encoders.factory import load_encoder
from models.pairs import DEFAULT_PAIR, load_pair


def main(arguments: Sequence[str] | None = None, *, load: Load = load_encoder) -> int:
    """Runs the command and returns its exit status; `load` loads one side of a pair."""
    options = _parser().parse_args(arguments)
    options.load = load
    return cli.run(lambda: options.run(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m evaluation.cmedteb", description=__doc__)
    commands = parser.add_subparsers(required=True)

    run = commands.add_parser("run", help="score systems and write table, runs and report")
    run.add_argument(
        "--system",
        action="append",
        help=f"a registered pair, the path of a pair's .toml, or bm25 (default {DEFAULT_PAIR})",
    )
    run.add_argument("--task", action="append", help="only this task, of those that are there")
    run.set_defaults(run=_run)

    tradeoff = commands.add_parser("tradeoff", help="draw nDCG@10 against queries/s")
    tradeoff.add_argument("--system", action="append", required=True)
    tradeoff.set_defaults(run=_tradeoff)

    report = commands.add_parser("report", help="write the HTML report of what was scored")
    report.add_argument("--failures", type=cli.positive_int, default=50, help="per task at most")
    report.set_defaults(run=_report)

    for command in (run, tradeoff, report):
        command.add_argument("--data", required=True, help="local folder, or 'hub'")
        command.add_argument("--hub", help="with --data hub: OWNER/NAME of CMedTEB's own data sets")
        command.add_argument("--split", default="test", help="split of local retrieval data")
    for command in (run, tradeoff):
        cache = Path("builds/embeddings")
        command.add_argument("--cache", type=Path, default=cache, help="folder of vectors")
        command.add_argument("--batch-size", type=cli.positive_int, default=32)

    versus = commands.add_parser("compare", help="test the difference of two scored systems")
    versus.add_argument("first")
    versus.add_argument("second")
    versus.set_defaults(run=_compare)
    for command in (run, tradeoff, report, versus):
        command.add_argument("--out", type=Path, required=True, help="folder of results")
    return parser


def _run(options: argparse.Namespace) -> None:
    found = _find(options, options.task or [])
    wanted = [task(name) for name in options.task] if options.task else list(found)
    absent = [known.name for known in TASKS if known not in found]
    if absent:
        print(f"not in {options.data}: {', '.join(absent)}")
    for system in _systems(options.system or [DEFAULT_PAIR], options):
        for known in wanted:
            print(f"{system.name}: {known.column} …", flush=True)
            evaluate_task(system, known, found[known](), options.out)
    table = markdown_table(read_scores(options.out))
    write_text(options.out / "table.md", table)
    print(table)
    print(f"written: {options.out / 'table.md'}, runs and scores in {options.out}/SYSTEM/")


def _find(options: argparse.Namespace, names: Sequence[str]) -> dict[Task, Callable[[], TaskData]]:
    found = find_tasks(options.data, options.split, options.hub)
    for name in names:
        if task(name) not in found:
            raise CareError.at(options.data, f"holds no {name}", "missing_task", task=name)
    return found


def _systems(names: Sequence[str], options: argparse.Namespace) -> list[System]:
    """Returns the systems; their names are those of folders."""
    systems: dict[str, System] = {}
    for given in names:
        system: System
        if given == BM25:
            system = Bm25Model()
        else:
            pair, size = load_pair(given), options.batch_size
            system = PairModel(pair, options.cache, batch_size=size, load=options.load)
        name = system.name
        if not re.fullmatch(r"\w[\w.-]*", name):
            message = f"{given}: '{name}' cannot name a folder of results"
            raise CareError(message, code="bad_system_name", system=name)
        if name in systems:
            message = f"{given}: another system is named '{name}' too"
            raise CareError(message, code="duplicate_system", system=name)
        systems[name] = system
    return list(systems.values())


def _tradeoff(options: argparse.Namespace) -> None:
    retrieval = task("retrieval")
    data = _find(options, [retrieval.name])[retrieval]()
    assert isinstance(data, RankingData)
    print(measure_tradeoff(_systems(options.system, options), retrieval, data, options.out))
    print(f"written: {options.out}/tradeoff.png, .svg, .md, .json")


def _compare(options: argparse.Namespace) -> None:
    scores = read_scores(options.out)
    for name in (options.first, options.second):
        if name not in scores:
            reason = f"has no scores of '{name}': there are {', '.join(scores)}"
            raise CareError.at(options.out, reason, "unknown_system", system=name)
    print(compare(scores[options.first], scores[options.second]), end="")


def _report(options: argparse.Namespace) -> None:
    tasks = find_tasks(options.data, options.split, options.hub)
    path = options.out / "report.html"
    write_text(path, html_report(options.out, tasks, failures=options.failures))
    print(f"written: {path}")


if __name__ == "__main__":
    sys.exit(main())
