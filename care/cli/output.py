"""How commands print their results: as text, or as one JSON object."""

import json
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from core.terminal import shown, shown_json


def show(result: Mapping[str, Any], lines: Iterable[str], *, as_json: bool) -> None:
    """Prints a result to standard output, as lines of text or as one JSON object.

    Values that JSON has no type for (paths, times) are written as text.
    """
    if as_json:
        text = json.dumps(result, ensure_ascii=False, default=str)
        print(shown_json(text, sys.stdout))
    else:
        print_lines(lines)


def print_lines(lines: Iterable[str]) -> None:
    """Prints lines of text to standard output."""
    for line in lines:
        print(shown(line), flush=True)


def note(message: str) -> None:
    """Prints a warning or a hint to standard error, where it is no part of the result."""
    print(shown(message), file=sys.stderr, flush=True)


def reporter(*, as_json: bool) -> Callable[[str], None]:
    """Returns what prints a line of progress: to standard error where the result is JSON."""
    return note if as_json else lambda message: print_lines([message])


def program() -> str:
    """Returns the words that call `care`, for commands that a user copies.

    Documents of a trained pair are encoded by torch, which another environment may lack: the
    path is given unless the shell finds this environment's `care`.
    """
    script = Path(sys.executable).with_name("care")
    if not script.is_file():
        return f"{shlex.quote(sys.executable)} -m care"
    return "care" if shutil.which("care") == str(script) else shlex.quote(str(script))
