"""`care bench`: benchmarks of the service and of encoders."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from care.cli.options import Json, takes_fields
from care.cli.output import show
from care.extras import require
from care.options import file, folder
from loadtest.bench.options import ServiceOptions
from loadtest.traffic import SAMPLE

app = typer.Typer(
    no_args_is_help=True,
    help="Measure the service and encoders, from a checkout.",
)


@app.command("service")
@takes_fields
def service(options: ServiceOptions) -> None:
    """Measure the service over HTTP beside the bare loop and other systems; needs wrk."""
    require("bench", make="bench")
    from loadtest.bench.processes import show_log
    from loadtest.bench.service import SCENARIOS, measure

    show_log()
    measure(SCENARIOS, options)


@app.command()
def encoders(
    pairs: Annotated[
        list[str],
        Argument(
            metavar="PAIR...",
            help="Trained or registered pairs, or paths of .toml files; ratios are relative to the "
            "first one.",
        ),
    ],
    queries: Annotated[Path, file("JSONL of queries with text.")] = SAMPLE,
    documents: Annotated[
        Path | None,
        file(
            "JSONL of documents with text: compare ONNX Runtime and OpenVINO with the "
            "document encoder of the first pair, instead of query encoders."
        ),
    ] = None,
    threads: Annotated[int, Option(min=1, help="Threads of an encoder.")] = 1,
    rounds: Annotated[int, Option(min=1, help="Rounds; the encoders alternate in each.")] = 15,
    json_: Json = False,
) -> None:
    """Compare the speed of query encoders, one query at a time and in batches of 32.

    With --documents, compare the engines and data types of a document encoder.
    """
    from loadtest.bench.encoders import compare, compare_documents, document_lines, lines

    if documents:
        found = compare_documents(pairs[0], documents, threads, rounds)
        show(found, document_lines(found), as_json=json_)
        return
    result = compare(pairs, queries, threads, rounds)
    show(result, lines(result), as_json=json_)


@app.command()
def weights(
    out: Annotated[Path, folder("Folder of the models.")],
) -> None:
    """Write the default pair's query side in the forms that other systems load."""
    require("bench", "train", make="bench")
    from loadtest.bench.weights import write_weights

    write_weights(out)
