"""An encoder for Ray actors that fails at a chosen text."""

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from core.encoders import Encoding
from core.errors import TextRejectedError
from tests.encoders import BigramEncoder

Trouble = Callable[[Path, int], None]


class LoggingEncoder(BigramEncoder):
    """Writes a file for each call of `encode` with its process and texts.

    Args:
        log: Folder of these files.
        trouble: Called with `log` and the position in the batch if a text contains `at`.
        at: Substring of one text.
    """

    def __init__(self, log: Path, trouble: Trouble | None = None, at: str = "") -> None:
        super().__init__("document")
        self._log = log
        self._trouble = trouble
        self._at = at

    def encode(self, texts: Sequence[str]) -> Encoding:
        call = json.dumps([os.getpid(), *texts])
        path = self._log / f"{uuid4()}.new"
        path.write_text(call)
        path.rename(path.with_suffix(".call"))
        for position, text in enumerate(texts):
            if self._trouble and self._at in text:
                self._trouble(self._log, position)
        return super().encode(texts)


def wait_for_another(log: Path, position: int) -> None:
    """Waits, so that one actor does not encode everything while others start."""
    deadline = time.monotonic() + 120
    while len(processes_of(log)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def die(log: Path, position: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_once(log: Path, position: int) -> None:
    wait_for_another(log, position)
    marker = log / "died"
    if not marker.exists():
        marker.touch()
        die(log, position)


def reject(log: Path, position: int) -> None:
    raise TextRejectedError("the text is rejected", position)


def fail(log: Path, position: int) -> None:
    raise RuntimeError("out of memory")


def kill_driver(log: Path, position: int) -> None:
    os.kill(int((log / "driver").read_text()), signal.SIGKILL)
    time.sleep(300)


def texts_of(log: Path) -> list[str]:
    """Returns the texts of all calls."""
    return [text for call in _calls(log) for text in call[1:]]


def processes_of(log: Path) -> set[int]:
    """Returns the processes of all calls."""
    return {call[0] for call in _calls(log)}


def _calls(log: Path) -> list[Any]:
    return [json.loads(path.read_text()) for path in log.glob("*.call")]
