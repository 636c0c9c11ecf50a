"""The audit log: who searched or changed which index when, without texts, filters and ids."""

import logging
import sys
from datetime import UTC, datetime
from logging.handlers import WatchedFileHandler
from typing import Any

from pydantic_core import to_json

from core.errors import CareError, describe

_LOG = logging.getLogger("care.service")
STDOUT = "-"


class AuditLog:
    """Appends one line of JSON for each request to a file, or for `-` to standard output.

    A file that is renamed or removed meanwhile is made again, as those that rotate logs expect. All
    workers write to the same file: each line is one write at its end. CareError if it cannot be
    written.
    """

    def __init__(self, path: str) -> None:
        self._error: BaseException | None = None
        try:
            self._handler = (
                logging.StreamHandler(sys.stdout)
                if path == STDOUT
                else WatchedFileHandler(path, encoding="utf-8")
            )
        except OSError as error:
            message = f"{path} cannot be written ({error.strerror}): correct CARE_AUDIT_FILE"
            raise CareError(message, code="audit_file_unwritable", path=path) from None
        self._handler.handleError = self._note  # type: ignore[method-assign]

    def write(self, state: dict[str, Any], route: str, status: str) -> None:
        """Appends the line of a request, given what its scope says of it."""
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "request_id": state["request_id"],
            "key": state.get("key"),
            "index": state.get("index"),
            "route": route,
            "status": int(status),
            "hits": state.get("hits"),
            **({"written": state["written"]} if "written" in state else {}),
        }
        text = to_json(line).decode()
        record = logging.LogRecord("care.audit", logging.INFO, "", 0, text, (), None)
        self._error, before = None, self._error
        try:
            self._handler.handle(record)
        except OSError as error:
            self._error = error
        if self._error and not before:
            # Those after it are lost without a word, until one can be written.
            fields = describe(self._error)
            _LOG.error("a line of the audit log cannot be written", extra={"fields": fields})

    def close(self) -> None:
        self._handler.close()

    def _note(self, record: logging.LogRecord) -> None:
        """Notes why a record was not written."""
        self._error = sys.exc_info()[1]
