"""Output to terminals and logs: any character in any encoding, escapes for what acts on them."""

import io
import os
import re
import sys
from pathlib import Path
from typing import Any

# Control characters and line breaks, marks and overrides of the direction of writing (which show
# text in another order), and lone surrogates.
_ACTIVE = "\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
_IN_TEXT = re.compile(f"[{_ACTIVE}]")
_IN_ASCII = re.compile(f"[{_ACTIVE}\x80-\U0010ffff]")


def shown(text: str) -> str:
    r"""Returns one line of text with escapes, such as `\x1b` and `\n`, for what acts on a terminal.

    Text of documents, names of files, messages of servers and queries pass through here.
    """
    if text.isprintable():
        return text
    return _IN_TEXT.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def shown_lines(text: str) -> str:
    """Returns text of several lines, each as `shown` returns it."""
    return "\n".join(map(shown, text.split("\n")))


def shown_json(text: str, stream: Any) -> str:
    r"""Returns a line of JSON with escapes, such as `\u202e`, for what acts on a terminal.

    For a stream whose encoding is no Unicode encoding the line is ASCII.
    """
    encoding = getattr(stream, "encoding", None) or "utf-8"
    unicode = encoding.lower().startswith("utf")
    if text.isascii() if not unicode else text.isprintable():
        return text
    return (_IN_TEXT if unicode else _IN_ASCII).sub(_json_escape, text)


def _json_escape(match: re.Match[str]) -> str:
    units = match[0].encode("utf-16-be", "surrogatepass").hex()
    return re.sub("....", r"\\u\g<0>", units)


def prepare_output() -> None:
    """Makes writing to stdout and stderr possible for each character, and where they are closed."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            # It takes the place of the closed one, which the next file would get otherwise.
            null = Path(os.devnull).open("w", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
            setattr(sys, name, null)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
