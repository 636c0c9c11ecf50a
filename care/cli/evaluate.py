"""`care evaluate`: the modes of an index beside BM25, reranking, weights, a `min_score`."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from care.cli.options import Index, Json, takes_fields
from care.cli.output import note, show
from care.extras import require
from care.options import EvaluationOptions

if TYPE_CHECKING:
    from evaluation.index_evaluation import IndexEvaluation
    from evaluation.statistics import Difference


@takes_fields
def evaluate(index: Index, options: EvaluationOptions, json_: Json = False) -> None:
    """Compare the modes of an index with BM25, and suggest a min_score.

    Differences of nDCG@10 are to mode dense, with 95 % intervals. Times are those of searches in
    this process; make bench measures the service. A warning counts judged documents that are not
    in the index.
    """
    require("eval", make="evaluate")
    from care.evaluation import compare_modes
    from core.records import write_json

    result = compare_modes(index, options)
    if result.warning:
        note(f"warning: {result.warning}")
    if options.output:
        write_json(options.output, result.as_json())
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
