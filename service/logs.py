"""Logs as JSON lines; an exception is told by its type and place, never by its message."""

import logging
import sys
import threading
import traceback
from asyncio import AbstractEventLoop
from datetime import UTC, datetime
from typing import Any

from pydantic_core import to_json

_LOG = logging.getLogger("care.service")


class JsonFormatter(logging.Formatter):
    """One JSON object a line; `extra={"fields": {...}}` adds to it.

    Messages of exceptions are left out: they could quote a query.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line of a record."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info and record.exc_info[1]:
            line |= describe(record.exc_info[1])
        return to_json(line).decode()


def configure_logs(level: str) -> None:
    """Sends all logs, warnings and unhandled errors to standard error, as JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    sys.excepthook = lambda _, error, __: _LOG.critical("unhandled", exc_info=error)
    threading.excepthook = lambda of: _LOG.error("unhandled in a thread", exc_info=of.exc_value)
    # Their messages at these levels quote keys, addresses or futures with their errors.
    for name in ("redis", "asyncio"):
        logging.getLogger(name).setLevel(logging.WARNING)


def describe(error: BaseException) -> dict[str, Any]:
    """Returns the type and place of an error as fields of a log line."""
    place = "".join(traceback.format_tb(error.__traceback__))
    return {"error": type(error).__name__, "traceback": place}


def log_failure(_: AbstractEventLoop, context: dict[str, Any]) -> None:
    """Logs what a task left unhandled; the event loop's own handler would quote the error."""
    error = context.get("exception")
    fields = describe(error) if error else {}
    _LOG.error("unhandled in the event loop", extra={"fields": fields})
