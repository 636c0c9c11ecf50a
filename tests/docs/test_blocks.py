"""Blocks of pages that need a GPU, a model hub, Docker, a cluster or hours are marked; their `care`
commands are parsed, so that at least their options exist.
"""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer

from care.cli.main import app
from tests.docs.pages import NEEDS, PAGES, ROOT, blocks, shell_commands

MARKS = {"needs", "file", "prints", "before"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_block_that_is_not_run_says_what_it_needs_and_has_options_that_exist(page: Path) -> None:
    for block in blocks(page):
        assert block.language, f"{block}: name the language, text if it is none"
        assert block.mark in MARKS | {""}, f"{block}: {block.mark}"
        if block.mark == "needs":
            assert block.value in NEEDS, f"{block}: {block.value} is none of {sorted(NEEDS)}"
            assert block.language in ("sh", "python"), f"{block}: is not run anyway"
        if block.language == "sh" and not block.runs:
            for words in shell_commands(block.text):
                check(words, str(block))


def check(words: list[str], place: str) -> None:
    """Parses a `care` command, or those that a `make` command would run."""
    if words[0] == "torchrun":
        words = words[words.index("-m") + 1 :]
    if words[0] == "runuser":
        words = ["care", *words[words.index("--") + 2 :]]
    if words[0] == "care":
        parse(words[1:], place)
    elif words[0] == "make":
        done = subprocess.run(
            ["make", "--dry-run", "--always-make", *words[1:]],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{place}: {words}: {done.stderr}"
        for command in shell_commands(done.stdout):
            if command[0].endswith("/bin/care"):
                parse(command[1:], place)


def parse(arguments: list[str], place: str) -> None:
    """Parses the arguments of `care` down to the subcommand, without running it."""
    command: Any = typer.main.get_command(app)
    context = command.make_context("care", list(arguments))
    while hasattr(command, "resolve_command"):
        rest = [*context._protected_args, *context.args]
        name, command, rest = command.resolve_command(context, rest)
        assert command, f"{place}: care {' '.join(arguments)}"
        context = command.make_context(name, rest, parent=context)
