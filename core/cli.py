"""How commands print errors and which status they return."""

import logging
import os
import sys
from collections.abc import Callable

from core.errors import CareError, QueryError


def run(command: Callable[[], None], *, interrupted: str = "interrupted") -> int:
    """Runs a command and prints its error on one line of stderr: `error: message [code]`.

    Returns:
        The exit status: 0, 1 for an error that the user can fix, 130 after Ctrl-C, 141 if the
        program that reads the output, such as head, has ended.
    """
    warnings = logging.StreamHandler()
    warnings.setLevel(logging.WARNING)
    logging.basicConfig(format="%(levelname)s: %(message)s", handlers=[warnings])
    try:
        command()
    except CareError as error:
        field = f"{error.field}: " if isinstance(error, QueryError) else ""
        print(f"error: {field}{error} [{error.code}]", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # Python flushes stdout once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        reason = f"{error.filename or 'disk'}: {error.strerror or error}"
        print(f"error: {reason} [input_output]", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        return 130
    return 0
