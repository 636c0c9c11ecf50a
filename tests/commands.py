"""Command lines of `care`, parsed by the real commands but not run."""

import re
import shlex
from typing import Any

import typer
from typer.core import TyperGroup

from care.cli.main import app

# How documents, manifests and make targets call the command.
_PROGRAM = re.compile(r"(\S*/)?(care|python3? -m care) ")


def parse(line: str) -> tuple[str, dict[str, Any]]:
    """Returns the name of the subcommand, such as "versions list", and its parameters by name.

    Raises the error of wrong usage that the command would print, and `KeyError` if there is no
    such subcommand.
    """
    program = _PROGRAM.match(line)
    assert program, f"not a care command: {line}"
    command: Any = typer.main.get_command(app)
    arguments = shlex.split(line[program.end() :])
    names = []
    while isinstance(command, TyperGroup):
        names.append(arguments.pop(0))
        command = command.commands[names[-1]]
    return " ".join(names), command.make_context(names[-1], arguments).params
