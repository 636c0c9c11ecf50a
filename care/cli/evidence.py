"""`care evidence`: how often the sentence of a passage that answers is found."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from care.cli.options import Json
from care.cli.output import show
from care.extras import require
from care.options import Queries, file, in_a_folder

if TYPE_CHECKING:
    from evaluation.evidence import Accuracy


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
    show(result, _lines(measured, left_out, out), as_json=json_)


def _lines(measured: "Accuracy", left_out: int, out: Path | None) -> Iterator[str]:
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
