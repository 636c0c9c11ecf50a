"""`care answerable`: whether an index answers a question, measured and calibrated."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from care.cli.options import Index, Json
from care.cli.output import show
from care.options import Indexes, MilvusUri, PairName
from core.choices import DEFAULT_INDEXES, DEFAULT_PAIR

if TYPE_CHECKING:
    from care.answerability import Measured


def answerable(
    index: Index,
    queries: Annotated[
        Path, typer.Option(metavar="FILE", help="JSONL of questions that the index answers.")
    ],
    unanswerable: Annotated[
        list[Path],
        typer.Option(
            metavar="FILE", help="JSONL of questions that it does not answer; may be repeated."
        ),
    ],
    qrels: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Judgements of the questions: they are also judged without their relevant "
            "documents.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Calibrate first, and write the pair with the result to this TOML file.",
        ),
    ] = None,
    refused: Annotated[
        float,
        typer.Option(
            min=0, max=0.5, help="Share of the answered questions that a calibration refuses."
        ),
    ] = 0.02,
    pair: PairName = DEFAULT_PAIR,
    indexes: Indexes = DEFAULT_INDEXES,
    milvus_uri: MilvusUri = None,
    json_: Json = False,
) -> None:
    """Measure which questions a pair says that an index does not answer; with --out, calibrate it.

    A calibration is fitted on all questions of --queries and on every second one of the other
    files; the others are measured. Measure it again on questions that it was not fitted on.
    """
    if out and not out.parent.is_dir():
        message = f"the folder {out.parent} does not exist."
        raise typer.BadParameter(message, param_hint="--out")
    from care.answerability import measure_answerability
    from models.pairs import load_pair

    where: dict[str, Any] = {"qrels": qrels, "indexes": indexes, "milvus_uri": milvus_uri}
    chosen = load_pair(pair)
    found = measure_answerability(
        index, chosen, queries, unanswerable, **where, out=out, refused=refused
    )
    result = {
        "pair": chosen.name,
        "judges": {mode: judge.model_dump() for mode, judge in found.judges.items()},
        "shares": [asdict(share) for share in found.shares],
    }
    show(result, _lines(found, out), as_json=json_)


def _lines(found: "Measured", out: Path | None) -> Iterator[str]:
    if not found.judges:
        yield "the pair has no calibration: make one with --out FILE.toml"
        return
    for mode, judge in found.judges.items():
        yield f"{mode}: threshold {judge.threshold}, intercept {judge.intercept}, {judge.weights}"
    yield "| mode | questions | number | refused | AUROC |"
    yield "|---|---|---:|---:|---:|"
    for share in found.shares:
        auroc = "" if share.auroc is None else f"{share.auroc:.3f}"
        cells = share.mode, share.name, f"{share.queries:,}", f"{share.refused:.1%}", auroc
        yield f"| {' | '.join(cells)} |"
    if out:
        yield f"wrote {out}: use it as --pair {out} or CARE_PAIR={out}"
