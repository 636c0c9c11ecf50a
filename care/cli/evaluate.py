"""`care evaluate`: the modes of an index beside BM25, reranking, weights, a `min_score`."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from care.cli.options import Index, Json
from care.cli.output import note, show
from care.extras import require
from care.options import Indexes, PairName
from core.choices import DEFAULT_INDEXES, DEFAULT_PAIR, DEFAULT_QUERY_CHARS

if TYPE_CHECKING:
    from evaluation.index_evaluation import IndexEvaluation
    from evaluation.statistics import Difference


def _numbers(text: str | None) -> str | None:
    """Checks that an option is a list of positive numbers."""
    for part in (text or "1").split(","):
        try:
            is_positive = 0 < float(part) < math.inf
        except ValueError:
            is_positive = False
        if not is_positive:
            raise typer.BadParameter(f"'{part}' is not a number above 0.")
    return text


def evaluate(
    index: Index,
    queries: Annotated[Path, typer.Option(metavar="FILE", help="JSONL with _id and text.")],
    qrels: Annotated[
        Path, typer.Option(metavar="FILE", help="TSV with query-id, corpus-id and score.")
    ],
    pair: PairName = DEFAULT_PAIR,
    indexes: Indexes = DEFAULT_INDEXES,
    weights: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Also compare these weights of full text in a hybrid search: 0.05,0.1,0.2",
            callback=_numbers,
        ),
    ] = None,
    rerank_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Server with /v1/rerank that ranks the hits again, in place of late interaction; "
            "with CARE_RERANK_KEY and CARE_RERANK_TRUNCATE_TOKENS.",
        ),
    ] = None,
    rerank_model: Annotated[
        str, typer.Option(metavar="NAME", help="The server's name of its model.")
    ] = "",
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the result as JSON.")
    ] = None,
    max_query_chars: Annotated[
        int,
        typer.Option(
            min=1,
            envvar="CARE_MAX_QUERY_CHARS",
            help="Most characters of a query; longer ones are an error.",
        ),
    ] = DEFAULT_QUERY_CHARS,
    json_: Json = False,
) -> None:
    """Compare the modes of an index with BM25, and suggest a min_score.

    Differences of nDCG@10 are to mode dense, with 95 % intervals. Times are those of searches in
    this process; make bench measures the service. A warning counts judged documents that are not
    in the index.
    """
    if output and not output.parent.is_dir():
        # Before the measurement, whose result would be lost.
        message = f"the folder {output.parent} does not exist."
        raise typer.BadParameter(message, param_hint="--output")
    require("eval", make="evaluate")
    from care.evaluation import compare_modes
    from core.records import write_json

    result = compare_modes(
        index,
        queries=queries,
        qrels=qrels,
        pair=pair,
        indexes=indexes,
        weights=[float(part) for part in (weights or "").split(",") if part],
        rerank_url=rerank_url,
        rerank_model=rerank_model,
        max_query_chars=max_query_chars,
    )
    if result.warning:
        note(f"warning: {result.warning}")
    if output:
        write_json(output, result.as_json())
    show(result.as_json(), _lines(result), as_json=json_)


def _lines(result: "IndexEvaluation") -> Iterator[str]:
    from evaluation.bm25 import ENGINE
    from evaluation.metrics import MEASURES
    from evaluation.thresholds import DEPTH, MIN_QUERIES

    yield (
        f"{result.queries:,} judged queries, {result.documents:,} documents, {result.version}; "
        f"{result.pair}, {result.factory}; default mode {result.mode}"
    )
    width = max(map(len, result.scores))
    columns = "  ".join(f"{name:>10}" for name in MEASURES)
    yield f"{'':{width}}  {columns}  {'nDCG@10 - dense, 95 %':>25}    q/s   p50   p99 [ms]"
    for system, values in result.scores.items():
        line = f"{system:{width}}  " + "  ".join(f"{values[name]:>10.4f}" for name in MEASURES)
        line += f"  {_interval(result.differences.get(system)):>25}"
        if speed := result.speeds.get(system):
            line += f"  {speed.queries_per_second:>5,.0f} {speed.p50_ms:>5.1f} {speed.p99_ms:>5.1f}"
        yield line
    if result.rerank_gain:
        yield f"nDCG@10 by ranking again, to mode {result.mode}: {_interval(result.rerank_gain)}"
    yield f"BM25: {ENGINE}"
    yield f"speed: {result.timed:,} queries, one after another in this process"
    sizes = (f"{name} {size:,.0f}" for name, size in result.bytes_per_passage.items())
    yield f"bytes per passage: {', '.join(sizes)}"
    found = result.min_score
    if found is None:
        yield f"min_score: no suggestion; fewer than {MIN_QUERIES} queries have a relevant hit"
    else:
        yield (
            f"min_score in mode {result.mode}: {found.min_score:.4f} keeps "
            f"{found.relevant_kept:.0%} of the relevant hits of the top {DEPTH} and drops "
            f"{found.others_dropped:.0%} of the others; {found.empty_queries:,} queries lose all "
            "hits"
        )
    if result.weights:
        yield from _weight_lines(result)


def _weight_lines(result: "IndexEvaluation") -> Iterator[str]:
    from evaluation.weights import best_weight

    yield f"{'lexical weight':14}  {'nDCG@10':>10}  {'difference, 95 %':>25}"
    for each in result.weights:
        yield f"{each.weight:<14g}  {each.ndcg:>10.4f}  {_interval(each.difference):>25}"
    best = best_weight(result.weights)
    if best is None:
        yield "no weight is better than dense by its interval: keep dense (--lexical-weight 0)"
    else:
        yield f"best: care update --index {result.index} --lexical-weight {best:g}"


def _interval(difference: "Difference | None") -> str:
    if difference is None:
        return ""
    return f"{difference.value:+.4f} ({difference.low:+.4f} to {difference.high:+.4f})"
