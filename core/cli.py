"""How commands print errors and which status they return."""

import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress

from core.errors import CareError, QueryError
from core.progress import on_terminal
from core.terminal import prepare_output, shown


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
