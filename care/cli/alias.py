"""`care alias`: other names of indexes, which can change from one index to another at once."""

from typing import Annotated

import typer
from typer import Argument

from care.cli.options import Json
from care.cli.output import show
from care.options import Indexes
from core.choices import DEFAULT_INDEXES

app = typer.Typer(no_args_is_help=True, help="Set, list and remove other names of indexes.")

Alias = Annotated[str, Argument(metavar="ALIAS", help="The other name.")]


@app.command("set")
def set_(
    alias: Alias,
    index: Annotated[str, Argument(metavar="INDEX", help="Name of the index.")],
    indexes: Indexes = DEFAULT_INDEXES,
    json_: Json = False,
) -> None:
    """Let an alias mean an index, in place of what it meant before; services follow at once."""
    from core.aliases import set_alias

    set_alias(indexes, alias, index)
    show({"alias": alias, "index": index}, [f"{alias} -> {index}"], as_json=json_)


@app.command()
def remove(alias: Alias, indexes: Indexes = DEFAULT_INDEXES, json_: Json = False) -> None:
    """Remove an alias; the index stays."""
    from core.aliases import remove_alias

    remove_alias(indexes, alias)
    show({"removed": alias}, [f"removed {alias}"], as_json=json_)


@app.command("list")
def list_(indexes: Indexes = DEFAULT_INDEXES, json_: Json = False) -> None:
    """List the aliases and their indexes."""
    from core.aliases import read_aliases

    found = read_aliases(indexes)
    lines = [f"{alias} -> {name}" for alias, name in found.items()] or ["no alias"]
    show({"aliases": found}, lines, as_json=json_)
