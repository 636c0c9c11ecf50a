"""`care evaluate`: the scores of an index beside BM25, and a suggested `min_score`."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from care.cli.options import Index, Indexes, Json, PairName
from care.cli.output import note, show
from care.extras import require
from core.choices import DEFAULT_INDEXES, DEFAULT_PAIR

if TYPE_CHECKING:
    from evaluation.index_evaluation import IndexEvaluation


def evaluate(
    index: Index,
    queries: Annotated[Path, typer.Option(metavar="FILE", help="JSONL with _id and text.")],
    qrels: Annotated[
        Path, typer.Option(metavar="FILE", help="TSV with query-id, corpus-id and score.")
    ],
    pair: PairName = DEFAULT_PAIR,
    indexes: Indexes = DEFAULT_INDEXES,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the result as JSON.")
    ] = None,
    json_: Json = False,
) -> None:
    """Score an index over HTTP beside BM25, and suggest a min_score.

    The command starts the service on a free port. A warning counts judged documents that are not
    in the index.
    """
    if output and not output.parent.is_dir():
        # Before the measurement, whose result would be lost.
        message = f"the folder {output.parent} does not exist."
        raise typer.BadParameter(message, param_hint="--output")
    require("eval", make="evaluate")
    from core.records import write_json
    from evaluation.index_evaluation import evaluate_index

    result = evaluate_index(indexes, index, pair, queries, qrels)
    if result.warning:
        note(f"warning: {result.warning}")
    if output:
        write_json(output, result.as_json())
    show(result.as_json(), _lines(result), as_json=json_)


def _lines(result: "IndexEvaluation") -> Iterator[str]:
    from evaluation.metrics import MEASURES
    from evaluation.thresholds import DEPTH, MIN_QUERIES

    yield f"{result.queries:,} judged queries, {result.documents:,} documents, {result.version}"
    width = max(map(len, result.scores))
    yield f"{'':{width}}  " + "  ".join(f"{name:>10}" for name in MEASURES)
    for system, values in result.scores.items():
        yield f"{system:{width}}  " + "  ".join(f"{values[name]:>10.4f}" for name in MEASURES)
    yield f"{result.queries_per_second:,.0f} queries/s in batches, one client"
    found = result.min_score
    if found is None:
        yield f"min_score: no suggestion; fewer than {MIN_QUERIES} queries have a relevant hit"
    else:
        yield (
            f"min_score: {found.min_score:.4f} keeps {found.relevant_kept:.0%} of the relevant "
            f"hits of the top {DEPTH} and drops {found.others_dropped:.0%} of the others; "
            f"{found.empty_queries:,} queries lose all hits"
        )
