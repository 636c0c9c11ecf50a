"""`care bench`: benchmarks of the service and of encoders."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from care.cli.options import Json, takes_fields
from care.cli.output import show
from care.extras import require
from care.options import file
from loadtest.bench.results import ServiceOptions
from loadtest.traffic import SAMPLE

app = typer.Typer(
    no_args_is_help=True,
    help="Measure the service and encoders, from a checkout.",
)


@app.command("service")
@takes_fields
def service(options: ServiceOptions) -> None:
    """Measure the service over HTTP: its modes, and overload; needs wrk."""
    require("bench", make="bench")
    from loadtest.bench.results import measure
    from loadtest.bench.service import SCENARIOS

    measure(SCENARIOS, options)


@app.command("peers")
@takes_fields
def peers(options: ServiceOptions) -> None:
    """Measure the service beside the bare loop and other systems; needs wrk."""
    require("bench", "train", make="bench-peers")
    from loadtest.bench.peers import SCENARIOS
    from loadtest.bench.results import measure

    measure(SCENARIOS, options, "peers")


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
    threads: Annotated[int, Option(min=1, help="Threads of an encoder.")] = 1,
    rounds: Annotated[int, Option(min=1, help="Rounds; the encoders alternate in each.")] = 15,
    json_: Json = False,
) -> None:
    """Compare the speed of query encoders, one query at a time and in batches of 32."""
    from loadtest.bench.encoders import compare, lines

    result = compare(pairs, queries, threads, rounds)
    show(result, lines(result), as_json=json_)
