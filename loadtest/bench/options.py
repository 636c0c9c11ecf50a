"""Options of the benchmarks over HTTP; each field is an option of `care bench`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from core.choices import DEFAULT_INDEXES, DEFAULT_PAIR
from core.machine import available_cpus
from loadtest.traffic import SAMPLE


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """Options of `care bench service` and `care bench peers`."""

    indexes: Annotated[
        Path, Option(envvar="CARE_INDEXES", metavar="FOLDER", help="Folder of all indexes.")
    ] = DEFAULT_INDEXES
    index: Annotated[
        str, Option(envvar="CARE_INDEX", metavar="NAME", help="Name of the index.")
    ] = "medical-qa"
    pair: Annotated[
        str,
        Option(
            envvar="CARE_PAIR",
            metavar="PAIR",
            help="Trained or registered pair, or path of a pair's .toml file.",
        ),
    ] = DEFAULT_PAIR
    workers: Annotated[
        int,
        Option(
            min=1,
            envvar="CARE_WORKERS",
            metavar="N",
            help="Workers of the service.",
            show_default="one for each processor",
        ),
    ] = available_cpus()
    queries: Annotated[Path, Option(metavar="FILE", help="JSONL of queries with text.")] = SAMPLE
    out: Annotated[Path, Option(metavar="FOLDER", help="Folder of results.")] = Path(
        "loadtest/results"
    )
    seconds: Annotated[int, Option(min=1, help="Seconds of one measurement.")] = 8
    rounds: Annotated[
        int, Option(min=1, help="Rounds; the compared systems alternate in each.")
    ] = 3
    connections: Annotated[
        int, Option(min=1, help="Concurrent clients that saturate the service.")
    ] = 64
    top_k: Annotated[int, Option(min=1, help="Number of hits per query.")] = 10
    only: Annotated[
        str, Option(metavar="NAMES", help="Scenarios to run, separated by commas (default: all).")
    ] = ""
