"""Restarts the process after SIGBUS: a memory-mapped file was truncated or cannot be read."""

import ctypes
import logging
import os
import signal
import sys

_LOG = logging.getLogger("care.service")


def restart_on_bus_error() -> None:
    """Makes the process log one line and start again, with the same process id, after SIGBUS.

    The kernel sends SIGBUS to a thread that reads a page of a mapped file which the file no longer
    has. Python runs handlers of `signal.signal` between two of its instructions, but the read that
    failed is repeated before that. This handler is therefore a function that C calls in the
    thread at once. It waits for the GIL if the thread does not hold it, and does not return.
    """
    # A process that was started by the handler inherits its mask, in which SIGBUS is blocked.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGBUS])
    ctypes.CDLL(None).signal(signal.SIGBUS, _HANDLER)


def _restart(_: int) -> None:
    try:
        message = "a mapped file was truncated or cannot be read (SIGBUS): the service starts again"
        _LOG.critical(message, extra={"fields": {"code": "bus_error"}})
        os.execv(sys.executable, sys.orig_argv)
    finally:
        os._exit(1)


# At module level, because C keeps no reference to it.
_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)(_restart)
