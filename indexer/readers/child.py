"""The child process that reads files: a request per line of its input, messages on its output.

A request names a file. The messages are JSON, one a line: `report` (how the file is read), records
and rejects (`record` or `reject`, with the `name` of the file and a `number`), `more_time` before a
page whose text is recognized, and at last `end`, which has a `code` and `reason` if the file cannot
be read.
"""

import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from indexer import limits
from indexer.readers.fields import FieldNames
from indexer.readers.formats import advice, format_of
from indexer.readers.source import Report, Source, UnreadableError

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Reads the files that the requests name, within the limits."""
    _limit()
    # What libraries print must not reach the messages.
    output = os.fdopen(os.dup(1), "w", encoding="utf-8", newline="\n")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        end: dict[str, Any] = {"end": True}
        try:
            source = partial(
                Source,
                fields=FieldNames.from_json(request["fields"]),
                ocr=request["ocr"],
                more_time=partial(_more_time, output),
            )
            with Path(request["path"]).open("rb") as stream:
                for message in _messages(request["name"], stream, source):
                    output.write(json.dumps(message) + "\n")
        except MemoryError:
            most = limits.READER_MEMORY_BYTES >> 30
            end |= {
                "code": "file_too_large",
                "reason": f"needs more than {most} GiB of memory: split it",
            }
        except Exception as error:
            end |= _failure(error)
        output.write(json.dumps(end) + "\n")
        output.flush()


def _limit() -> None:
    """Limits memory, files and their size, and ends this process with its parent."""
    for what, limit in (
        (resource.RLIMIT_AS, limits.READER_MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, limits.MAX_UNPACKED_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(what)[1]
        with suppress(OSError, ValueError):  # not every system has each of them
            most = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
            resource.setrlimit(what, (most, most))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _more_time(output: TextIO) -> None:
    output.write('{"more_time": true}\n')
    output.flush()


def _messages(
    name: str, stream: BinaryIO, source: Callable[..., Source]
) -> Iterator[dict[str, Any]]:
    reports: list[Report] = []
    format_ = format_of(name)
    if format_ is None:
        raise UnreadableError(advice(name), "unsupported_format")
    if not format_.is_archive:
        for number, content in format_.load()(source(name, stream, report=reports.append)):
            yield from _reported(reports)
            yield _message(name, number, content)
        yield from _reported(reports)
        return
    for member, content in format_.load()(stream):
        inner = f"{name}/{member}"
        own = format_of(member)
        if isinstance(content, str):
            yield _message(inner, 0, content)
        elif own is None or own.is_archive:
            reason = "is an archive in an archive: unpack it" if own else advice(member)
            yield _message(inner, 0, reason)
        else:
            try:
                yield from _messages(inner, content, source)
            except (MemoryError, ModuleNotFoundError):
                raise
            except Exception as error:
                if (failure := _failure(error))["code"] != "empty_file":
                    yield _message(inner, 0, failure["reason"])


def _reported(reports: list[Report]) -> Iterator[dict[str, Any]]:
    while reports:
        yield {"report": reports.pop(0).as_json()}


def _message(name: str, number: int, content: dict[str, Any] | str) -> dict[str, Any]:
    kind = "reject" if isinstance(content, str) else "record"
    return {"name": name, "number": number, kind: content}


def _failure(error: Exception) -> dict[str, str]:
    if isinstance(error, UnreadableError):
        return {"code": error.code, "reason": str(error)}
    if isinstance(error, ModuleNotFoundError):
        extras = "files,ocr" if error.name == "rapidocr" else "files"
        reason = f"needs {error.name}: pip install 'care-retrieval[{extras}]'"
        return {"code": "not_installed", "reason": reason}
    # Libraries raise errors of many types for damaged files.
    detail = " ".join(str(error).split())[:300] or type(error).__name__
    return {"code": "unreadable", "reason": f"cannot be read: it may be damaged ({detail})"}
