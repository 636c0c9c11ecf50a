"""`care evaluate`, `care answerable` and `care evidence`: measured on judged queries.

They measure the modes of an index beside other systems, whether it answers a question, and the
sentence of a passage that does.
"""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from care.cli.options import Index, Json, OnlyIndex, index_name, takes_fields
from care.cli.output import note, show
from care.extras import require
from care.options import (
    AnswerabilityOptions,
    EvaluationOptions,
    Location,
    PairName,
    Queries,
    file,
    in_a_folder,
)
from core.choices import DEFAULT_PAIR

if TYPE_CHECKING:
    from care.answerability import Measured
    from evaluation.comparison import Comparison
    from evaluation.evidence import Accuracy
    from evaluation.index_evaluation import IndexEvaluation, Speed
    from evaluation.statistics import Difference, Interval


@takes_fields
def evaluate(*, index: OnlyIndex = None, options: EvaluationOptions, json_: Json = False) -> None:
    """Compare the modes of an index with BM25, other pairs and runs, and suggest a min_score.

    Intervals of nDCG@10 and of its differences to mode dense are those of 95 %, with p of the
    paired randomisation test. Times are those of searches in this process; make bench measures the
    service. A warning counts judged documents that are not in the index.

    Without --queries, runs are scored by the judgements; differences are to the first run.
    """
    require("eval", make="evaluate")
    from care.evaluation import compare_files, compare_modes

    if options.queries is not None:
        result = compare_modes(index_name(index, options.indexes), options)
        if result.warning:
            note(f"warning: {result.warning}")
        show(result.as_json(), _lines(result), as_json=json_)
        _write(result.comparison, result.as_json(), options)
        return
    if not options.runs:
        reason = "give the queries that an index is searched with, or a run to score"
        raise typer.BadParameter(reason, param_hint="--queries or --run")
    compared = compare_files(options.runs, options.qrels)
    found = {"queries": len(compared.queries), **compared.as_json()}
    lines = [f"{found['queries']:,} judged queries", *_table(compared, {})]
    show(found, lines, as_json=json_)
    _write(compared, found, options)


def _write(compared: "Comparison", result: dict[str, object], options: EvaluationOptions) -> None:
    from core.records import write_json

    given = [str(path) for path in options.runs or ()]
    for name in given:
        if absent := sum(not compared.runs[name].get(query) for query in compared.queries):
            note(f"warning: {name} has no hit for {absent:,} judged queries, which score 0")
    if options.output:
        write_json(options.output, result)
    if options.per_query:
        compared.write_per_query(options.per_query)
    if options.save_runs:
        compared.write_runs(
            options.save_runs, [name for name in compared.runs if name not in given]
        )


def _table(compared: "Comparison", speeds: "dict[str, Speed]") -> Iterator[str]:
    from evaluation.comparison import NDCG
    from evaluation.metrics import MEASURES

    width = max(map(len, compared.scores))
    others = [name for name in MEASURES if name != NDCG]
    line = f"{'':{width}}  {NDCG:>8}  {'95 %':>16}  " + "  ".join(f"{name:>10}" for name in others)
    label = f"{NDCG} - {compared.baseline}, 95 %"
    room = max(25, len(label))
    if compared.differences:
        line += f"  {label:>{room}}  {'p':>6}"
    yield line + ("    q/s   p50   p99 [ms]" if speeds else "")
    for system, values in compared.scores.items():
        line = f"{system:{width}}  {values[NDCG]:>8.4f}  {_bounds(compared.intervals[system])}  "
        line += "  ".join(f"{values[name]:>10.4f}" for name in others)
        difference = compared.differences.get(system)
        if difference or speeds:
            line += f"  {_interval(difference):>{room}}"
            line += f"  {difference.p:>6.4f}" if difference else f"  {'':6}"
        if speed := speeds.get(system):
            line += f"  {speed.queries_per_second:>5,.0f} {speed.p50_ms:>5.1f} {speed.p99_ms:>5.1f}"
        yield line.rstrip()


def _lines(result: "IndexEvaluation") -> Iterator[str]:
    from evaluation.bm25 import ENGINE
    from evaluation.weights import MIN_QUERIES, SCORED_HITS

    yield (
        f"{result.queries:,} judged queries, {result.documents:,} documents, {result.version}; "
        f"{result.pair}, {result.factory}; default mode {result.mode}"
    )
    yield from _table(result.comparison, result.speeds)
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
            f"{found.relevant_kept:.0%} of the relevant hits of the top {SCORED_HITS} and drops "
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


def _bounds(interval: "Interval") -> str:
    return f"{interval.low:.4f} - {interval.high:.4f}"


@takes_fields
def answerable(
    index: Index,
    options: AnswerabilityOptions,
    pair: PairName = DEFAULT_PAIR,
    *,
    where: Location,
    json_: Json = False,
) -> None:
    """Measure which questions a pair says that an index does not answer; with --out, calibrate it.

    A calibration is fitted on all questions, and each of them is measured by what is fitted on the
    others. Measure it again on questions of other writers.
    """
    from care.answerability import measure_answerability
    from models.pairs import load_pair

    chosen = load_pair(pair)
    found = measure_answerability(index, chosen, options, where)
    result = {
        "pair": chosen.name,
        "judges": {mode: judge.model_dump() for mode, judge in found.judges.items()},
        "shares": [asdict(share) for share in found.shares],
    }
    show(result, _answerable_lines(found, options.out), as_json=json_)


def _answerable_lines(found: "Measured", out: Path | None) -> Iterator[str]:
    if not found.judges:
        yield "the pair has no calibration: make one with --out FILE.toml"
        return
    for mode, judge in found.judges.items():
        yield f"{mode}: threshold {judge.threshold}, intercept {judge.intercept}, {judge.weights}"
    yield "| mode | vectors | questions | number | refused | before | AUROC |"
    yield "|---|---:|---|---:|---:|---:|---:|"
    for share in found.shares:
        auroc = "" if share.auroc is None else f"{share.auroc:.3f}"
        before = "" if share.before is None else f"{share.before:.1%}"
        cells = f"{share.queries:,}", f"{share.refused:.1%}", before, auroc
        yield f"| {share.mode} | {share.vectors:,} | {share.name} | {' | '.join(cells)} |"
    if out:
        yield f"wrote {out}: use it as --pair {out} or CARE_PAIR={out}"


def evidence(
    corpus: Annotated[Path, file("JSONL with _id and text.")],
    queries: Queries,
    marks: Annotated[
        Path,
        file("JSONL with query-id, corpus-id and sentences, offsets of those that answer."),
    ],
    out: Annotated[
        Path | None,
        file("Fit the weights on the marks, and write them to this file.", callback=in_a_folder),
    ] = None,
    json_: Json = False,
) -> None:
    """Measure how often the sentence that answers is chosen; with --out, fit what chooses it.

    What is fitted is measured by cross-validation. Measure it again on marks that it was not
    fitted on, once it is search/evidence.npz.
    """
    require("eval")
    from evaluation.evidence import accuracy, fit, read_marks

    found, left_out = read_marks(corpus, queries, marks)
    if out:
        model, measured = fit(found)
        model.write(out)
    else:
        measured = accuracy(found)
    result = {**asdict(measured), "left_out": left_out, "out": out}
    show(result, _evidence_lines(measured, left_out, out), as_json=json_)


def _evidence_lines(measured: "Accuracy", left_out: int, out: Path | None) -> Iterator[str]:
    yield f"{measured.marks:,} marks, {left_out:,} left out{', cross-validated' * bool(out)}"
    shares = {
        "right": measured.right,
        "shown": measured.shown,
        "right of those shown": measured.right_of_shown,
    }
    for name, share in shares.items():
        if share:
            yield f"{name}: {share.value:.1%} (95 % interval {share.low:.1%} to {share.high:.1%})"
    if out:
        yield f"wrote {out}"
