"""Documents in lines of JSON, which are written in groups while they arrive."""

import asyncio
from codecs import BOM_UTF8
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect

from core.errors import CareError
from core.writes import INVALID_RECORD, Rejected, Write, Written
from service.access.guards import (
    charge_rate,
    check_again,
    get_state,
    index_name,
    visible_to,
    writes_of,
)
from service.errors import RequestError
from service.http.body import invalid, parse_line
from service.writes import before_deadline, changes

_T = TypeVar("_T")

# Documents of the first group. The next has twice as many if that took less than `_SHORT` [s], and
# half as many if it took more than a quarter of its time; at most `CARE_MAX_DOCUMENTS`.
_FIRST, _SHORT = 8, 1.0
# How long lines wait for others of their group [s].
_PATIENCE = 1.0
# Rejected lines that the answer lists.
_MOST_LISTED = 1000
# Errors after which a group waits for its turn, as long as its deadline allows.
_WAIT_AFTER = ("overloaded", "rate_limited")


@dataclass(frozen=True, slots=True)
class Line:
    """A line that is not empty; `number` counts all lines from 1."""

    number: int
    text: bytes


class _Lines:
    """Reads the lines of a body, which is never in memory as a whole.

    A group has at most a quarter of `CARE_MAX_BODY_BYTES`, and one line, which has at most half of
    them. What has been read and not written yet counts as the body of the request (`held`), by
    which the service bounds the bodies of all requests.
    """

    def __init__(self, request: Request) -> None:
        self._receive = request.receive
        self._state = request.scope["state"]
        most = get_state(request).settings.max_body_bytes
        self._most_of_group, self._most_of_line = most // 4, most // 2
        self._ready: deque[Line] = deque()
        self._rest = b""  # a line that has not ended yet
        self._ended = False
        self._number = 0

    async def group(self, most: int) -> list[Line]:
        """Returns the next lines, at most so many; none at the end of the body.

        Lines that have arrived wait at most `_PATIENCE` for others.
        """
        group: list[Line] = []
        size = 0
        loop = asyncio.get_running_loop()
        until: float | None = None
        while len(group) < most and size < self._most_of_group:
            if self._ready:
                group.append(line := self._ready.popleft())
                size += len(line.text)
                until = until or loop.time() + _PATIENCE
                continue
            if self._ended:
                break
            self._state["held"] = size + len(self._rest)
            try:
                async with asyncio.timeout_at(until):
                    await self._read()
            except TimeoutError:
                break
        return group

    async def _read(self) -> None:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        *whole, self._rest = (self._rest + message.get("body", b"")).split(b"\n")
        if not message.get("more_body", False):
            self._ended = True
            whole.append(self._rest)
            self._rest = b""
        for text in whole:
            self._number += 1
            self._check(text, self._number)
            text = text.removeprefix(BOM_UTF8) if self._number == 1 else text
            if text.strip():
                self._ready.append(Line(self._number, text))
        self._check(self._rest, self._number + 1)

    def _check(self, text: bytes, number: int) -> None:
        if len(text) > self._most_of_line:
            longest = f"line {number} is longer than {self._most_of_line} bytes"
            raise RequestError("body_too_long", longest, limit=self._most_of_line)


@dataclass
class _Total:
    """What the groups so far have changed."""

    written: Written = field(default_factory=lambda: Written("", 0))
    documents: int = 0  # that were read
    rejected: list[dict[str, Any]] = field(default_factory=list)
    left_off: int = 0  # rejected ones that are not in the list

    def add(self, group: list[Line], faults: dict[int, str], written: Written) -> None:
        """Adds a group; `faults` are those of lines that are no document, by their place in it."""
        put = [place for place in range(len(group)) if place not in faults]
        found = [Rejected(place, None, INVALID_RECORD, why) for place, why in faults.items()]
        found += [replace(one, position=put[one.position]) for one in written.rejected]
        for one in sorted(found, key=lambda one: one.position):
            if len(self.rejected) == _MOST_LISTED:
                self.left_off += 1
                continue
            where = {
                "position": self.documents + one.position,
                "line": group[one.position].number,
            }
            self.rejected.append(one.as_json() | where)
        counts = {
            name: getattr(self.written, name) + getattr(written, name)
            for name in ("added", "replaced", "deleted", "unchanged")
        }
        self.written = Written(written.version, written.number, **counts)
        self.documents += len(group)

    def changes(self) -> dict[str, int]:
        """Returns the numbers of documents by what was done to them."""
        return changes(self.written) | {"rejected": len(self.rejected) + self.left_off}


async def write_lines(request: Request, timeout_ms: int | None) -> dict[str, Any]:
    """Writes the documents in the lines of a body; each group has the time of one request.

    What is written stays, also if an error ends the request or its client disconnects.
    """
    state = get_state(request)
    settings, loop = state.settings, asyncio.get_running_loop()
    seconds = (timeout_ms or settings.timeout_ms) / 1000
    lines, total, last, most = _Lines(request), _Total(), 0, _FIRST
    try:
        while group := await lines.group(min(most, settings.max_documents)):
            if state.engine.is_draining:
                raise RequestError("shutting_down", "the service is shutting down")
            started = loop.time()
            faults, written = await _write_group(request, group, started + seconds)
            total.add(group, faults, written)
            request.scope["state"]["written"] = total.changes()
            last, took = group[-1].number, loop.time() - started
            if took < _SHORT:
                most = min(2 * most, settings.max_documents)
            elif took > seconds / 4:
                most = max(1, most // 2)
    except CareError as error:
        if last:
            done = f"the lines up to {last} are written: send the request again"
            error.args = (f"{error}; {done}",)
        raise
    if not last:
        raise invalid([{"type": "missing", "loc": (), "msg": "has no document"}])
    index = {"name": index_name(request), "version": total.written.version}
    counts = {name: n for name, n in total.changes().items() if name not in ("missing", "rejected")}
    listed = {"rejected": total.rejected, "more_rejected": total.left_off}
    return {"index": index, **counts, "missing": [], **listed}


async def _write_group(
    request: Request, group: list[Line], deadline: float
) -> tuple[dict[int, str], Written]:
    """Writes a group; returns why lines are no document, by their place in it, and the result.

    The key is checked as of a request of its own, so that one that was removed writes no more.
    """
    check_again(request, "write")
    values = get_state(request).settings.max_documents * 256
    found = await asyncio.to_thread(lambda: [parse_line(line.text, values) for line in group])
    faults = {place: value for place, value in enumerate(found) if isinstance(value, str)}
    put = tuple(value for value in found if isinstance(value, dict))
    write = Write(index_name(request), put=put, within=visible_to(request) or None)
    async with before_deadline(deadline):
        await _in_turn(partial(charge_rate, request, len(group)), deadline)
        return faults, await _in_turn(partial(writes_of(request).write, write), deadline)


async def _in_turn(ask: Callable[[], Awaitable[_T]], deadline: float) -> _T:
    """Asks again as long as it is not the group's turn, and there is time."""
    while True:
        try:
            return await ask()
        except RequestError as error:
            wait = float(error.fields.get("retry_after", 1.0))
            if error.code not in _WAIT_AFTER or asyncio.get_running_loop().time() + wait > deadline:
                raise
            await asyncio.sleep(wait)
