"""`care answerable`: whether an index answers a question, measured and calibrated."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from care.cli.options import Index, Json, takes_fields
from care.cli.output import show
from care.options import AnswerabilityOptions, Location, PairName
from core.choices import DEFAULT_PAIR

if TYPE_CHECKING:
    from care.answerability import Measured


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
    show(result, _lines(found, options.out), as_json=json_)


def _lines(found: "Measured", out: Path | None) -> Iterator[str]:
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
