"""Options that several commands take, and commands that take the fields of a dataclass."""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer

Index = Annotated[str, typer.Option(envvar="CARE_INDEX", metavar="NAME", help="Name of the index.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]


def takes(kind: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command an option for each field of a dataclass, whose type says which.

    The command gets them together as its argument `options`.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(kind, include_extras=True)

        @wraps(command)
        def run(**given: Any) -> None:
            shared = {name: given.pop(name) for name in hints}
            command(options=kind(**shared), **given)

        own = inspect.signature(command).parameters.values()
        parameters = [parameter for parameter in own if parameter.name != "options"] + [
            inspect.Parameter(
                each.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=_default(each),
                annotation=hints[each.name],
            )
            for each in fields(kind)
        ]
        # Typer reads both.
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def _default(each: "Field[Any]") -> Any:
    if "default" in each.metadata:
        return each.metadata["default"]
    return each.default if each.default_factory is MISSING else each.default_factory()
