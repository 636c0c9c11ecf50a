"""How commands print their results: as text, or as one JSON object."""

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any


def show(result: Mapping[str, Any], lines: Iterable[str], *, as_json: bool) -> None:
    """Prints a result to standard output, as lines of text or as one JSON object.

    Values that JSON has no type for (paths, times) are written as text.
    """
    if as_json:
        print(json.dumps(result, ensure_ascii=False, default=str))
    else:
        for line in lines:
            print(line)


def note(message: str) -> None:
    """Prints a warning or a hint to standard error, where it is no part of the result."""
    print(message, file=sys.stderr, flush=True)


def reporter(*, as_json: bool) -> Callable[[str], None]:
    """Returns what prints a line of progress: to standard error where the result is JSON."""
    return note if as_json else partial(print, flush=True)
