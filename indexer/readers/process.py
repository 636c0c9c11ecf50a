"""Reads ordinary files in a child process, which is stopped if a file takes too long."""

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from indexer import limits
from indexer.readers.fields import FieldNames
from indexer.readers.source import Report, UnreadableError

# The name of the file below the corpus; the number of a row, page or section, 0 for the file; and a
# record with the fields of a JSONL corpus, or the reason why there is none.
Found = tuple[str, int, dict[str, Any] | str]

# The child imports what this process does, and nothing from the current folder, which may be that
# of the files.
_COMMAND = "import json,sys;sys.path[:]=json.loads(sys.argv[1]);"
_COMMAND += "from indexer.readers.child import main;main()"
_PIECE = 1 << 16
_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "SYSTEMROOT")


class ReaderProcess:
    """Reads files one after the other; the child process starts with the first."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._buffer = bytearray()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def read(
        self, path: Path, name: str, fields: FieldNames, *, ocr: bool = False
    ) -> Iterator[Found | Report]:
        """Yields reports, and the records of a file; the name of a file decides its format.

        With `ocr` the text of scanned pages is recognized. UnreadableError if the file cannot be
        read, or exceeds a limit.
        """
        request = {
            "path": str(path.absolute()),
            "name": name,
            "fields": asdict(fields),
            "ocr": ocr,
        }
        size = path.stat().st_size
        seconds = limits.READER_SECONDS + limits.READER_SECONDS_PER_MIB * size / (1 << 20)
        is_whole = False
        try:
            for message in self._messages(request, seconds):
                if report := message.get("report"):
                    yield Report.from_json(report)
                elif message.get("end"):
                    is_whole = True
                    if reason := message.get("reason"):
                        raise UnreadableError(reason, message["code"])
                    return
                else:
                    content: dict[str, Any] | str = message.get("reject") or message["record"]
                    yield message["name"], message["number"], content
        finally:
            if not is_whole:  # the child still writes messages of this file
                self._stop()

    def _messages(self, request: dict[str, Any], seconds: float) -> Iterator[dict[str, Any]]:
        """Sends a request and yields messages; only the time in which the child works counts."""
        child = self._start()
        assert child.stdin and child.stdout
        child.stdin.write(json.dumps(request).encode() + b"\n")
        child.stdin.flush()
        pages = 0
        while True:
            while (end := self._buffer.find(b"\n")) < 0:
                if len(self._buffer) > 2 * limits.MAX_RECORD_BYTES:
                    raise UnreadableError(
                        f"has a record longer than {limits.MAX_RECORD_BYTES} bytes: split it",
                        "file_too_large",
                    )
                started = time.monotonic()
                if not select.select([child.stdout], [], [], max(seconds, 0))[0]:
                    raise UnreadableError(
                        "takes too long to read: it may be damaged, or split it", "file_too_slow"
                    )
                seconds -= time.monotonic() - started
                piece = os.read(child.stdout.fileno(), _PIECE)
                if not piece:
                    raise UnreadableError(
                        f"ends the process that reads it ({_status(child)}): it is damaged, or "
                        "needs too much memory",
                        "unreadable",
                    )
                self._buffer += piece
            line = bytes(self._buffer[:end])
            del self._buffer[: end + 1]
            message = json.loads(line)
            if message.get("more_time"):
                pages += 1
                if pages <= limits.MAX_PAGES:
                    seconds += limits.READER_SECONDS_PER_OCR_PAGE
            else:
                yield message

    def _start(self) -> subprocess.Popen[bytes]:
        if self._child is None:
            self._buffer.clear()
            paths: Sequence[str] = [str(Path(path).absolute()) for path in sys.path if path]
            self._child = subprocess.Popen(
                [sys.executable, "-P", "-c", _COMMAND, json.dumps(paths)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=_environment(),
            )
        return self._child

    def _stop(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            with child:  # closes its pipes, and waits for it
                pass


def _environment() -> dict[str, str]:
    """Returns the variables of the child: keys and tokens are not for the readers of files."""
    kept = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    return kept | {"OMP_NUM_THREADS": "1"}


def _status(child: subprocess.Popen[bytes]) -> str:
    code = child.wait()
    return f"signal {-code}" if code < 0 else f"status {code}"
