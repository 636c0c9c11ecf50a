"""`care indexes` creates and deletes indexes, `care alias` gives them names that can change."""

from typing import Annotated

import typer
from typer import Argument, Option

from care.cli.options import Json
from care.cli.output import show
from care.options import Indexes, MilvusUri, PairName, vector_stores
from core.choices import DEFAULT_INDEXES, DEFAULT_PAIR

app = typer.Typer(no_args_is_help=True, help="Create and delete indexes.")

Name = Annotated[str, Argument(metavar="NAME", help="Name of the index.")]


@app.command()
def create(
    name: Name,
    like: Annotated[str, Option(metavar="NAME", help="Index whose settings it gets.")],
    filter_field: Annotated[
        list[str] | None,
        Option(
            metavar="FIELD",
            help="Metadata field that filters may have before a document has it. May be repeated.",
        ),
    ] = None,
    indexes: Indexes = DEFAULT_INDEXES,
    pair: PairName = DEFAULT_PAIR,
    json_: Json = False,
) -> None:
    """Create an index without documents; if there is an equal one, nothing changes.

    It takes documents over HTTP and by `care update`. Quotas are those of a service (CARE_*).
    """
    from care.live import LiveIndexes
    from service.settings import read_settings

    settings = read_settings().model_copy(update={"indexes": indexes, "pair": pair})
    made = LiveIndexes(settings).create(name, like, filter_field or ())
    found = "" if made["created"] else ": there is an equal index"
    line = f"active  {indexes / name / made['version']}{found}"
    show({"index": name, **made}, [line], as_json=json_)


@app.command()
def delete(
    name: Name,
    indexes: Indexes = DEFAULT_INDEXES,
    milvus_uri: MilvusUri = None,
    json_: Json = False,
) -> None:
    """Delete an index with all of its versions; services answer 404 for it at once."""
    from indexer.live.creation import delete_index
    from indexer.publication import IndexWriter

    documents = delete_index(IndexWriter(indexes, name, vector_stores(milvus_uri)))
    show({"deleted": name, "documents": documents}, [f"deleted {name}"], as_json=json_)


aliases = typer.Typer(no_args_is_help=True, help="Set, list and remove other names of indexes.")

Alias = Annotated[str, Argument(metavar="ALIAS", help="The other name.")]


@aliases.command("set")
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


@aliases.command("remove")
def remove_(alias: Alias, indexes: Indexes = DEFAULT_INDEXES, json_: Json = False) -> None:
    """Remove an alias; the index stays."""
    from core.aliases import remove_alias

    remove_alias(indexes, alias)
    show({"removed": alias}, [f"removed {alias}"], as_json=json_)


@aliases.command("list")
def list_(indexes: Indexes = DEFAULT_INDEXES, json_: Json = False) -> None:
    """List the aliases and their indexes."""
    from core.aliases import read_aliases

    found = read_aliases(indexes)
    lines = [f"{alias} -> {name}" for alias, name in found.items()] or ["no alias"]
    show({"aliases": found}, lines, as_json=json_)
