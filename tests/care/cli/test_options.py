"""Commands that take the fields of dataclasses as options."""

from dataclasses import dataclass, field
from typing import Annotated

import pytest
import typer
from typer import Option
from typer.testing import CliRunner

from care.cli.options import takes_fields


@dataclass(frozen=True)
class Place:
    name: Annotated[str, Option(metavar="NAME")]
    size: Annotated[int, Option(min=1)] = 3


@dataclass(frozen=True)
class Limits:
    rate: Annotated[float, Option()] = field(default_factory=float, metadata={"default": 0.5})


@pytest.fixture
def taken() -> list[object]:
    return []


@pytest.fixture
def app(taken: list[object]) -> typer.Typer:
    made = typer.Typer()

    @made.command()
    @takes_fields
    def run(
        first: Annotated[int, Option()] = 1,
        *,
        place: Place,
        limits: Limits,
        last: Annotated[bool, Option("--last")] = False,
    ) -> None:
        taken.extend([first, place, limits, last])

    return made


def test_a_command_gets_the_dataclasses(app: typer.Typer, taken: list[object]) -> None:
    result = CliRunner().invoke(app, ["--name", "a", "--rate", "0.1", "--last"])
    assert result.exit_code == 0
    assert taken == [1, Place("a"), Limits(0.1), True]


def test_the_default_of_an_option_is_that_of_the_metadata(
    app: typer.Typer, taken: list[object]
) -> None:
    assert CliRunner().invoke(app, ["--name", "a"]).exit_code == 0
    assert taken[2] == Limits(0.5)


@pytest.mark.parametrize("arguments", [[], ["--name", "a", "--size", "0"]])
def test_fields_are_checked_as_options(
    app: typer.Typer, taken: list[object], arguments: list[str]
) -> None:
    assert CliRunner().invoke(app, arguments).exit_code == 2
    assert not taken


def test_options_stand_where_the_argument_stands(app: typer.Typer) -> None:
    names = [each.name for each in typer.main.get_command(app).params]
    assert [name for name in names if "completion" not in str(name)] == [
        "first",
        "name",
        "size",
        "rate",
        "last",
    ]
