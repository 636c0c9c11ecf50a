"""Logs as JSON lines; exceptions are logged by type and traceback, without their messages."""

import json
import logging
import os
import sys
import threading
from asyncio import AbstractEventLoop
from datetime import UTC, datetime
from typing import Any

import onnxruntime
from pydantic_core import PydanticSerializationError, to_json

from core.errors import describe
from core.terminal import shown_json

_LOG = logging.getLogger("care.service")
# ONNX Runtime's numbers for levels: 2 is warning, 3 is error.
_ONNX_RUNTIME_ERROR = 3


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object; `extra={"fields": {...}}` adds fields to it.

    Messages of exceptions are omitted: they could quote a query.
    """

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info and record.exc_info[1]:
            line |= describe(record.exc_info[1])
        try:
            text = to_json(line).decode()
        except (
            PydanticSerializationError
        ):  # half a surrogate pair, as in undecodable names of files
            text = json.dumps(line, default=str)
        return shown_json(text, sys.stderr)


def configure_logs(level: str) -> None:
    """Writes all logs, warnings and unhandled errors to standard error, as JSON lines.

    Libraries that write lines of their own from native code are silenced below the level error.
    """
    # Of a record the formatter reads neither thread, process nor caller, which take time to find.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    sys.excepthook = lambda _, error, __: _LOG.critical("unhandled error", exc_info=error)
    sys.unraisablehook = lambda of: _LOG.error("error in a finalizer", exc_info=of.exc_value)
    threading.excepthook = lambda of: _LOG.error(
        "unhandled error in a thread", exc_info=of.exc_value
    )
    # At lower levels these loggers quote keys, addresses, or futures with their errors.
    for name in ("redis", "asyncio"):
        logging.getLogger(name).setLevel(logging.WARNING)
    onnxruntime.set_default_logger_severity(_ONNX_RUNTIME_ERROR)
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # of the Milvus client, imported later


def log_failure(_: AbstractEventLoop, context: dict[str, Any]) -> None:
    """Logs an error that a task did not handle; asyncio's own handler would quote its message."""
    error = context.get("exception")
    fields = describe(error) if error else {}
    _LOG.error("unhandled error in the event loop", extra={"fields": fields})
