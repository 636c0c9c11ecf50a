"""The Markdown pages of the repository, cut into their fenced blocks."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Pages whose blocks are run; the others have their links checked alone.
PAGES = (
    ROOT / "README.md",
    ROOT / "README.zh.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "operate").glob("*.md")),
)
# Blocks that need "clients" are run by tests/engines/clients.
NEEDS = frozenset({"gpu", "hub", "docker", "cluster", "hours", "clients", "root", "wheel"})

_BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>\w+): (?P<value>.*?) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block, and the comment `<!-- mark: value -->` right above it.

    `needs` is what a block cannot be run without; `file` is the name under which a block is
    written before later ones run.
    """

    page: Path
    line: int
    language: str
    text: str
    mark: str
    value: str

    @property
    def runs(self) -> bool:
        return self.language in ("sh", "python") and self.mark != "needs"

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)} line {self.line}"


def blocks(page: Path) -> list[Block]:
    text = page.read_text("utf-8")
    return [
        Block(
            page,
            text.count("\n", 0, match.start()) + 1,
            match["language"],
            match["text"],
            match["mark"] or "",
            match["value"] or "",
        )
        for match in _BLOCK.finditer(text)
    ]


def shell_commands(text: str) -> Iterator[list[str]]:
    """Yields the words of each command of a shell block, without variables set before it."""
    text = re.sub(r"<<'(\w+)'\n.*?^\1$", "", text, flags=re.MULTILINE | re.DOTALL)
    command = ""
    for line in text.replace("\\\n", " ").splitlines(keepends=True):
        command += line
        try:
            words = shlex.split(command, comments=True)
        except ValueError:  # a quotation that goes over several lines
            continue
        command = ""
        while words and re.match(r"\w+=", words[0]):
            words = words[1:]
        if words:
            yield words
    assert not command, command
