"""Options that several commands take, and commands that take the fields of dataclasses."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer import Option

from care.options import folder

Index = Annotated[str, Option(envvar="CARE_INDEX", metavar="NAME", help="Name of the index.")]
OnlyIndex = Annotated[
    str | None,
    Option(
        "--index",
        envvar="CARE_INDEX",
        metavar="NAME",
        help="Name of the index (default: the only one in --indexes).",
    ),
]
Port = Annotated[
    str | None, Option(metavar="PORT", help="Port to listen on (default: CARE_PORT, or 8000).")
]
Json = Annotated[bool, Option("--json", help="Print the result as one JSON object.")]
Changes = Annotated[
    list[str] | None,
    Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a key of the file, as in stages.align.epochs=2 or judges.0.model=m. May be "
        "repeated.",
    ),
]


@dataclass(frozen=True, slots=True)
class Served:
    """What a service serves; None for the setting of the environment."""

    index: Annotated[
        str | None,
        Option(metavar="NAME", help="Name of the index (default: CARE_INDEX, or sample)."),
    ] = None
    pair: Annotated[
        str | None,
        Option(
            metavar="PAIR",
            help="Trained or registered pair, or path of a .toml file (default: CARE_PAIR, or "
            "care-mini).",
        ),
    ] = None
    indexes: Annotated[
        Path | None, folder("Folder of all indexes (default: CARE_INDEXES, or indexes).")
    ] = None


def index_name(given: str | None, indexes: Path) -> str:
    """Returns the name of an index, by default that of the only one in the folder `indexes`."""
    if given:
        return given
    from core.versions import list_indexes

    found = list_indexes(indexes)
    if len(found) != 1:
        reason = f"{indexes} has the indexes {', '.join(found)}" if found else f"{indexes} has none"
        raise typer.BadParameter(f"name an index: {reason}.", param_hint="--index")
    return found[0]


def takes_fields(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command an option for each field of its arguments that are dataclasses.

    The options stand where the argument stands; the type of a field says which option it is.
    """
    own = inspect.signature(command).parameters
    kinds = {name: each.annotation for name, each in own.items()}
    groups: dict[str, Any] = {name: kind for name, kind in kinds.items() if is_dataclass(kind)}

    @wraps(command)
    def run(**given: Any) -> None:
        for name, kind in groups.items():
            given[name] = kind(**{each.name: given.pop(each.name) for each in fields(kind)})
        command(**given)

    parameters = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, each in own.items()
        for parameter in (_parameters(groups[name]) if name in groups else [each])
    ]
    # Typer reads both.
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _parameters(kind: type[Any]) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    for each in fields(kind):
        default = each.metadata.get("default", each.default)
        yield inspect.Parameter(
            each.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if default is MISSING else default,
            annotation=hints[each.name],
        )
