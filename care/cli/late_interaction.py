"""`care late-interaction`: graphs with token vectors, and what they gain in reranking."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from care.cli.options import Json
from care.cli.output import reporter, show
from care.extras import require
from care.options import PairName, Qrels, Queries, file, folder, positive
from core.choices import DEFAULT_PAIR, Codec

if TYPE_CHECKING:
    from evaluation.late_interaction import Row

app = typer.Typer(
    no_args_is_help=True,
    help="Add token vectors to the graphs of a pair, and measure what they gain in reranking.",
)


@app.command()
def export(
    out: Annotated[Path, folder("Folder of the exported pair.")],
    pair: PairName = DEFAULT_PAIR,
    projections: Annotated[
        Path | None,
        file(
            "tokens.safetensors of a run with late_interaction; without it the states of the "
            "last layer are rotated at random, which needs no training."
        ),
    ] = None,
    weight: Annotated[
        float, Option(help="Weight of late interaction in a search.", callback=positive)
    ] = 1.0,
    pooling: Annotated[
        int, Option(min=1, help="Tokens of a document per vector that an index stores.")
    ] = 2,
    codec: Annotated[Codec, Option(help="How an index stores a token vector.")] = "2bit",
    json_: Json = False,
) -> None:
    """Write a copy of a pair whose graphs also compute token vectors.

    The sentence vectors are the same, and so is the embedding space: indexes of the pair can be
    searched with it.
    """
    require("train", make="export")
    from models.pairs import load_pair
    from training.export.tokens import export_tokens

    how: dict[str, Any] = {"weight": weight, "pooling": pooling, "codec": codec}
    exported = export_tokens(load_pair(pair), projections, out, **how)
    show({"pair": exported}, [f"wrote {exported}"], as_json=json_)


@app.command()
def evaluate(
    pair: PairName,
    corpus: Annotated[Path, file("JSONL of documents.")],
    queries: Queries,
    qrels: Qrels,
    tuning_qrels: Annotated[
        Path, file("TSV of other queries, on which the weights of scores are chosen.")
    ],
    poolings: Annotated[
        str, Option(metavar="NUMBERS", help="Tokens per stored vector, separated by commas.")
    ] = "1,2,4",
    output: Annotated[Path | None, file("Also write the table as JSON.")] = None,
    json_: Json = False,
) -> None:
    """Print nDCG@10 of reranking by the bytes that a passage's token vectors take.

    The candidates are the first 60 documents by cosine and by BM25. All documents are encoded;
    their token vectors are kept in memory.
    """
    numbers = _numbers(poolings)
    require("eval", make="evaluate")
    from core.machine import available_cpus
    from core.records import write_json
    from core.text import normalize_text
    from evaluation.beir import document_texts, read_documents, read_judged_queries
    from evaluation.late_interaction import encode, find_candidates, table
    from models.encoders.onnx import OnnxEncoder
    from models.late_interaction import CODECS
    from models.pairs import load_pair

    loaded = load_pair(pair)
    encoders = {
        spec.role: OnnxEncoder(spec, loaded.folder, available_cpus())
        for spec in (loaded.query, loaded.document)
    }
    asked, judged = read_judged_queries(queries, qrels)
    others, tuning = read_judged_queries(queries, tuning_qrels)
    texts = {id_: normalize_text(text) for id_, text in (asked | others).items()}
    found = encode(encoders["query"], texts)
    documents = document_texts(read_documents(corpus))
    report = reporter(as_json=json_)
    report(f"encoding {len(documents):,} documents")
    stored = encode(encoders["document"], documents)
    candidates = find_candidates(texts, found.vectors, documents, stored.vectors)
    rows = list(table(judged, tuning, candidates, found.tokens, stored.tokens, numbers, CODECS))
    dimension = encoders["document"].token_dimension
    result = {
        "pair": loaded.name,
        "dimension": dimension,
        "queries": len(judged),
        "rows": [asdict(row) for row in rows],
    }
    if output:
        write_json(output, result)
    show(result, _lines(rows, len(judged), dimension), as_json=json_)


def _numbers(text: str) -> list[int]:
    if not all(part.isdecimal() and int(part) for part in text.split(",")):
        raise typer.BadParameter("must be numbers above 0", param_hint="--poolings")
    return [int(part) for part in text.split(",")]


def _lines(rows: "Sequence[Row]", queries: int, dimension: int) -> Iterator[str]:
    yield f"{queries:,} judged queries, {dimension} dimensions per token"
    yield "| ranking | pooling | codec | bytes | late | BM25 | nDCG@10 | gain | 95 % interval |"
    yield "|---|---:|---|---:|---:|---:|---:|---:|---|"
    for row in rows:
        cells = [row.ranking, *((str(row.pooling), row.codec) if row.codec else ("", ""))]
        cells.append(f"{row.bytes_per_passage:,.0f}" if row.codec else "")
        cells += [f"{row.weights.late:g}", f"{row.weights.bm25:g}", f"{row.ndcg:.4f}"]
        cells.append(f"{row.gain.value:+.4f}")
        cells.append(f"{row.gain.low:+.4f} to {row.gain.high:+.4f}")
        yield f"| {' | '.join(cells)} |"
