"""Commands, options and make targets that the prose of the documents names exist."""

import re
from pathlib import Path
from typing import Any

import pytest
import typer

from care.cli.main import app
from tests.docs.pages import PAGES, ROOT

DOCUMENTS = (*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "deploy" / "README.md")
_INLINE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_OPTION = re.compile(r"--[a-z][a-z-]+")


def inline(page: Path) -> list[str]:
    """The inline code of a page; a line break inside is a blank."""
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    return [" ".join(code.split()) for code in _INLINE.findall(text)]


def named_command(words: list[str]) -> Any:
    """Returns the command that the first words name, however deep."""
    command: Any = typer.main.get_command(app)
    for word in words:
        children = getattr(command, "commands", {})
        if not children or not re.fullmatch(r"[a-z][a-z-]*", word):
            return command
        assert word in children, f"care {' '.join(words)}"
        command = children[word]
    return command


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_care_commands_that_the_prose_names_have_these_options(page: Path) -> None:
    for code in inline(page):
        if code.startswith("care "):
            command = named_command(code.split()[1:])
            options = {"--help", *(name for each in command.params for name in each.opts)}
            assert set(_OPTION.findall(code)) <= options, code


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_make_targets_that_the_documents_name_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = set(re.findall(r"^([a-z0-9-]+):", makefile, re.MULTILINE))
    named = re.findall(r"(?:^|`)make ([a-z0-9-]+)", page.read_text("utf-8"), re.MULTILINE)
    assert set(named) <= targets
