"""`care demo`: the sample corpus, indexed and served."""

import os
from typing import Annotated

from typer import Option

from care.cli.options import Port
from care.cli.output import print_lines


def demo(
    port: Port = None,
    check: Annotated[
        bool,
        Option("--check", help="End after the questions, with status 1 if an answer is wrong."),
    ] = False,
) -> None:
    """Index the sample corpus, serve it with a search page and ask four questions.

    The index is written to the folders of CARE_INDEXES and CARE_BUILDS; Ctrl-C ends the service.
    """
    if port is not None:
        os.environ["CARE_PORT"] = port
    from care.demo import demo as run_demo

    run_demo(lambda line: print_lines([line]), check=check)
