"""What all commands share: types of arguments, and how an error is shown."""

import argparse
import logging
import sys
from collections.abc import Callable
from contextlib import suppress

from core.errors import CareError


def run(command: Callable[[], None], *, interrupted: str = "interrupted") -> int:
    """Runs a command and shows its error as one line: `error: message [code]`.

    Returns the exit status: 0, 1 for an error that a user can act on, 130 after Ctrl-C.
    """
    warnings = logging.StreamHandler()
    warnings.setLevel(logging.WARNING)
    logging.basicConfig(format="%(levelname)s: %(message)s", handlers=[warnings])
    try:
        command()
    except CareError as error:
        print(f"error: {error} [{error.code}]", file=sys.stderr)
        return 1
    except OSError as error:
        reason = f"{error.filename or 'disk'}: {error.strerror or error}"
        print(f"error: {reason} [input_output]", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        return 130
    return 0


def whole_number(text: str) -> int:
    """An argument that is 0 or a whole number above it."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number")
    return int(text)


def positive_int(text: str) -> int:
    """An argument that is a whole number above 0."""
    number = whole_number(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def positive_float(text: str) -> float:
    """An argument that is a number above 0."""
    return _number(text, "above 0", lambda number: 0 < number < float("inf"))


def fraction(text: str) -> float:
    """An argument that is a number from 0 to 1."""
    return _number(text, "from 0 to 1", lambda number: 0 <= number <= 1)


def _number(text: str, where: str, fits: Callable[[float], bool]) -> float:
    with suppress(ValueError):
        if fits(number := float(text)):
            return number
    raise argparse.ArgumentTypeError(f"'{text}' is not a number {where}")
