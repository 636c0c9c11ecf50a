"""Options that several commands take; defaults come from the variables of the service."""

from pathlib import Path
from typing import Annotated

import typer

Indexes = Annotated[
    Path, typer.Option(envvar="CARE_INDEXES", metavar="FOLDER", help="Folder of all indexes.")
]
Builds = Annotated[
    Path,
    typer.Option(envvar="CARE_BUILDS", metavar="FOLDER", help="Folder of resumable builds."),
]
Index = Annotated[str, typer.Option(envvar="CARE_INDEX", metavar="NAME", help="Name of the index.")]
PairName = Annotated[
    str,
    typer.Option(
        envvar="CARE_PAIR",
        metavar="PAIR",
        help="Trained or registered pair, or path of a pair's .toml file.",
    ),
]
MilvusUri = Annotated[
    str | None,
    typer.Option(
        envvar="CARE_MILVUS_URI",
        metavar="URI",
        help="Address of Milvus; its token is read from CARE_MILVUS_TOKEN.",
        rich_help_panel="Milvus",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]
