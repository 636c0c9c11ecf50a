"""How commands write to terminals and logs and which status they return.

Any character is written in any encoding; what acts on a terminal is escaped.
"""

import io
import logging
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from core.errors import CareError, QueryError

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


def on_terminal() -> bool:
    """Returns whether standard error is a terminal."""
    return sys.stderr is not None and sys.stderr.isatty()


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


class _Formatter(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return shown(super().formatMessage(record))


def run(command: Callable[[], int | None], *, interrupted: str = "interrupted") -> int:
    """Runs a command and prints its error on one line of stderr: `error: message [code]`.

    All commands pass here: afterwards stdout and stderr take each character, whatever their
    encoding.

    Returns:
        The exit status: that of the command, 1 for an error that the user can fix, 130 after
        Ctrl-C, 141 if the program that reads the output, such as head, has ended.
    """
    prepare_output()
    if not on_terminal():
        os.environ.setdefault("TQDM_DISABLE", "1")  # bars of libraries
    warnings = logging.StreamHandler()
    warnings.setLevel(logging.WARNING)
    warnings.setFormatter(_Formatter("%(levelname)s: %(message)s"))
    logging.basicConfig(handlers=[warnings])
    try:
        status = command() or 0
        sys.stdout.flush()
        return status
    except CareError as error:
        field = f"{error.field}: " if isinstance(error, QueryError) else ""
        status, message = 1, f"error: {field}{error} [{error.code}]"
    except BrokenPipeError:
        _flush()
        return 141
    except OSError as error:
        reason = f"{error.filename or 'disk'}: {error.strerror or error}"
        status, message = 1, f"error: {reason} [input_output]"
    except KeyboardInterrupt:
        status, message = 130, interrupted
    with suppress(OSError):  # the status tells it too
        print(shown(message), file=sys.stderr)
    _flush()
    return status


def _flush() -> None:
    """Writes what the streams hold, or drops it, as Python would fail to write it at its end."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
