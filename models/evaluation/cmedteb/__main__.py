"""`python -m models.evaluation.cmedteb`: score systems on CMedTEB, compare and report."""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from core.errors import CareError
from core.files import write_text, writing_in
from models.evaluation.cmedteb.evaluate import evaluate_task
from models.evaluation.cmedteb.report import html_report
from models.evaluation.cmedteb.results import read_scores
from models.evaluation.cmedteb.systems import BM25, Bm25Model, PairModel
from models.evaluation.cmedteb.table import compare, markdown_table
from models.evaluation.cmedteb.tasks import TASKS, RankingTask, find_tasks, task
from models.evaluation.cmedteb.tradeoff import (
    bm25_side,
    document_bytes,
    is_asymmetric,
    measure_rates,
    query_side,
    write_tradeoff,
)
from models.evaluation.plots import SystemPoint
from models.evaluation.statistics import Interval
from models.pairs import DEFAULT_PAIR, load_pair

_CACHE = Path("builds/embeddings")


def main() -> int:
    """Runs the command; returns 1 for a user's error."""
    options = _parser().parse_args()
    try:
        with writing_in(options.out):
            options.run(options)
    except CareError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m models.evaluation.cmedteb", description=__doc__
    )
    commands = parser.add_subparsers(required=True)

    run = commands.add_parser("run", help="score systems and write table, runs and report")
    run.add_argument(
        "--system",
        action="append",
        help=f"a registered pair, the path of a pair's .toml, or bm25 (default {DEFAULT_PAIR})",
    )
    _data_arguments(run)
    run.add_argument("--task", action="append", help="only this task, of those that are there")
    run.add_argument("--cache", type=Path, default=_CACHE, help="folder of vectors")
    run.add_argument("--batch-size", type=_positive, default=32)
    run.set_defaults(run=_run)

    versus = commands.add_parser("compare", help="test the difference of two scored systems")
    versus.add_argument("first")
    versus.add_argument("second")
    versus.add_argument("--out", type=Path, required=True, help="folder of results")
    versus.set_defaults(run=_compare)

    tradeoff = commands.add_parser("tradeoff", help="draw nDCG@10 against queries/s")
    tradeoff.add_argument("--system", action="append", required=True)
    _data_arguments(tradeoff)
    tradeoff.add_argument("--cache", type=Path, default=_CACHE, help="folder of vectors")
    tradeoff.add_argument("--batch-size", type=_positive, default=32)
    tradeoff.set_defaults(run=_tradeoff)

    report = commands.add_parser("report", help="write the HTML report of what was scored")
    _data_arguments(report)
    report.add_argument("--failures", type=_positive, default=50, help="queries shown per task")
    report.set_defaults(run=_report)
    return parser


def _data_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", required=True, help="local folder, or 'hub'")
    parser.add_argument("--hub", help="with --data hub: OWNER/NAME of CMedTEB's own data sets")
    parser.add_argument("--split", default="test", help="split of local retrieval data")
    parser.add_argument("--out", type=Path, required=True, help="folder of results")


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise ValueError(text)
    return value


def _run(options: argparse.Namespace) -> None:
    found = find_tasks(options.data, options.split, options.hub)
    wanted = [task(name) for name in options.task] if options.task else list(found)
    if missing := [known.name for known in wanted if known not in found]:
        raise CareError(f"{options.data} holds no {missing[0]}")
    absent = [known.name for known in TASKS if known not in found]
    if absent:
        print(f"not in {options.data}: {', '.join(absent)}")
    for system in _systems(options.system or [DEFAULT_PAIR], options):
        for known in wanted:
            print(f"{system.name}: {known.column} …", flush=True)
            evaluate_task(system, known, found[known], options.out)
    table = markdown_table(read_scores(options.out))
    write_text(options.out / "table.md", table)
    print(table)
    print(f"written: {options.out / 'table.md'}, runs and scores in {options.out}/SYSTEM/")


def _systems(names: Sequence[str], options: argparse.Namespace) -> list[PairModel | Bm25Model]:
    """Returns the systems; their names are those of folders."""
    systems: list[PairModel | Bm25Model] = [
        Bm25Model()
        if name == BM25
        else PairModel(load_pair(name), options.cache, batch_size=options.batch_size)
        for name in names
    ]
    seen: set[str] = set()
    for given, system in zip(names, systems, strict=True):
        if not re.fullmatch(r"\w[\w.-]*", system.name):
            raise CareError(f"{given}: '{system.name}' cannot name a folder of results")
        if system.name in seen:
            raise CareError(f"{given}: another system is named '{system.name}' too")
        seen.add(system.name)
    return systems


def _tradeoff(options: argparse.Namespace) -> None:
    retrieval = task("retrieval")
    data = find_tasks(options.data, options.split, options.hub).get(retrieval)
    if not isinstance(data, RankingTask):
        raise CareError(f"{options.data} holds no retrieval task")
    scores, answers, pairs = {}, {}, {}
    for system in _systems(options.system, options):
        print(f"{system.name}: {retrieval.column} …", flush=True)
        score = evaluate_task(system, retrieval, data, options.out)
        assert score is not None
        scores[system.name] = Interval(score.value, score.low, score.high)
        if isinstance(system, Bm25Model):
            answers[system.name] = bm25_side(data.ranking.corpus)
        else:
            pairs[system.name] = system.pair
            answers[system.name] = query_side(system.pair, retrieval)
    print("queries/s …", flush=True)
    rates = measure_rates(answers, list(data.ranking.queries.values()))
    points = [
        SystemPoint(
            name,
            rates[name],
            scores[name],
            asymmetric=name in pairs and is_asymmetric(pairs[name]),
            document_bytes=document_bytes(pairs[name]) if name in pairs else None,
        )
        for name in scores
    ]
    print(write_tradeoff(points, options.out))
    print(f"written: {options.out}/tradeoff.png, .svg, .md, .json")


def _compare(options: argparse.Namespace) -> None:
    scores = read_scores(options.out)
    for name in (options.first, options.second):
        if name not in scores:
            known = ", ".join(scores)
            raise CareError(f"{options.out} has no scores of '{name}': there are {known}")
    print(compare(scores[options.first], scores[options.second]), end="")


def _report(options: argparse.Namespace) -> None:
    tasks = find_tasks(options.data, options.split, options.hub)
    path = options.out / "report.html"
    write_text(path, html_report(options.out, tasks, failures=options.failures))
    print(f"written: {path}")


if __name__ == "__main__":
    sys.exit(main())
