"""Histories of concurrent requests that write and read documents, and the check of their answers.

Random clients write a few documents and read them on several connections. Then, for each document,
an order of the requests is looked for that explains all answers (Wing and Gong, 1993). In it

- a request comes after those that were answered before it was sent, so that what is acknowledged is
  found by all later reads, and a connection never goes back. Only reads of different connections
  may change places: a worker may serve a write, before it is acknowledged, sooner than another;
- a write without an answer has happened at any time after it was sent, or not at all.

What is refused appears in no order. Reads may fail on connections of a killed process only.
"""

import re
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from http.client import HTTPException
from itertools import count
from math import inf
from random import Random
from threading import Lock, Thread
from typing import Any, Protocol

# The numbers of the writes of a text and its metadata; None if there is no document.
State = tuple[int, int] | None
GROUPS = 3
# What a write requires of a document, if not a state of it.
ANY, EXISTS, ABSENT = "any", "exists", "absent"
_READS = ("read", "find")
_UNCHANGING = ("changed", "missing", "unchanged")
_CONTRADICTS: Any = "the answer contradicts the state"


@dataclass(frozen=True, slots=True)
class Event:
    """What one request did to, or found of, one document.

    Attributes:
        kind: put, patch, delete, clear (deletes documents of a group), read (the whole document) or
            find (whether it has the text of a write).
        value: Number of the write, or the group.
        call: When the request was sent [s].
        ret: When its answer was read [s]; infinite if none came.
        connection: Number of its connection.
        outcome: Of a read its state; of `find` whether it is found; of a write added, replaced,
            unchanged, deleted, missing, changed (a condition did not hold), or None if not known.
        match: What `If-Match` or `If-None-Match` required.
    """

    kind: str
    value: int
    call: float
    ret: float
    connection: int
    outcome: Any
    match: Any = ANY


def step(event: Event, state: State) -> Any:
    """Returns the state after an event, or `_CONTRADICTS`."""
    kind, value, outcome = event.kind, event.value, event.outcome
    if kind in _READS:
        found = state if kind == "read" else state is not None and state[0] == value
        return state if found == outcome else _CONTRADICTS
    holds = {ANY: True, EXISTS: state is not None, ABSENT: state is None}.get(
        event.match, state == event.match
    )
    if not holds:
        return state if outcome in (None, "changed") else _CONTRADICTS
    if kind == "clear":
        return None if state and state[1] % GROUPS == value else state
    new: State = (value, value) if kind == "put" else None
    if kind == "patch" and state:
        new = state[0], value
    if state is None:
        said = "added" if kind == "put" else "missing"
    else:
        said = "deleted" if kind == "delete" else "unchanged" if new == state else "replaced"
    return new if outcome in (None, said) else _CONTRADICTS


def explained(events: Sequence[Event]) -> bool:
    """Returns whether an order of the events of one document explains all answers."""
    before = [sum(1 << j for j, b in enumerate(events) if _precedes(b, a)) for a in events]
    needed = sum(1 << i for i, event in enumerate(events) if event.ret < inf)
    # What changes nothing wherever it stands is best put in the order as soon as it fits.
    still = [e.kind in _READS or e.outcome in _UNCHANGING for e in events]
    open_: list[tuple[int, State]] = [(0, None)]
    seen = set(open_)
    while open_:
        done, state = open_.pop()
        following: list[tuple[int, State]] = []
        rest = [i for i in range(len(events)) if not done >> i & 1]
        moved = True
        while moved:
            moved, following = False, []
            for i in rest:
                if done >> i & 1 or before[i] & ~done:
                    continue
                new = step(events[i], state)
                if new is _CONTRADICTS:
                    continue
                if still[i]:
                    done, moved = done | 1 << i, True
                else:
                    following.append((1 << i, new))
        if not needed & ~done:
            return True
        fresh = {(done | bit, new) for bit, new in following} - seen
        seen |= fresh
        open_ += fresh
    return False


def contradiction(events: Sequence[Event]) -> Event | None:
    """Returns the first event whose answer no order explains, if there is one."""
    if explained(events):
        return None

    def until(end: float) -> list[Event]:
        sent = [e for e in events if e.call < end and (e.ret <= end or e.kind not in _READS)]
        return [e if e.ret <= end else replace(e, ret=inf, outcome=None) for e in sent]

    ended = sorted((e for e in events if e.ret < inf), key=lambda e: e.ret)
    return ended[bisect_left(ended, True, key=lambda e: not explained(until(e.ret)))]


def _precedes(a: Event, b: Event) -> bool:
    reads = a.kind in _READS and b.kind in _READS
    return a.ret < b.call and not (reads and a.connection != b.connection)


class Connection(Protocol):
    """A connection that is kept open; `opened` is when that was, `number` differs from all."""

    number: int
    opened: float

    def ask(
        self, method: str, path: str, body: Any, headers: dict[str, str]
    ) -> tuple[int, str, Any]:
        """Returns status, ETag and JSON of an answer; OSError or HTTPException if it is lost."""

    def close(self) -> None:
        """Closes it."""


class Service(Protocol):
    """What clients use: `kills` has when a process had ended, infinite until then, and its kind."""

    kills: list[tuple[float, str]]

    def connect(self) -> Connection:
        """Returns a new connection; waits while the service starts."""

    def kill(self, random: Random) -> None:
        """Kills a process of the service."""


@dataclass
class History:
    """Requests to some documents of a service, with what was answered.

    Attributes:
        name: Letters and digits that no other history of the service has.
        seed: What determines the requests of each client, though not how they interleave.
        kills: Number of processes to kill.
        errors: What is wrong apart from orders.
    """

    service: Service
    name: str
    seed: int
    operations: int = 200
    clients: int = 4
    documents: int = 5
    kills: int = 0
    events: dict[str, list[Event]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ids = [f"{self.name}d{i}x" for i in range(self.documents)]
        self.events = {id_: [] for id_ in self.ids}
        # Of each document, the last state that was read, and its ETag.
        self.tags: dict[str, tuple[State, str]] = {}
        self.numbers = count(1)
        self.lock = Lock()
        random = Random(self.seed)
        self.kill_at = set(random.sample(range(self.operations), self.kills))
        self.done = count()

    def run(self) -> list[str]:
        """Sends the requests, reads all documents at the end, and returns what is wrong."""
        clients = [_Client(self, Random(f"{self.seed} {i}")) for i in range(self.clients)]
        threads = [Thread(target=client.run, daemon=True) for client in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        clients.append(_Client(self, Random(self.seed), 4))
        for client in clients:
            for slot in range(len(client.connections)):
                for id_ in self.ids:
                    client.read(slot, id_)
                    client.search(slot, id_)
        for client in clients:
            client.close()
        wrong = list(self.errors)
        for id_, events in self.events.items():
            if event := contradiction(events):
                lines = [str(e) for e in sorted(events, key=lambda e: e.call)]
                wrong.append(f"{id_}: no order explains {event} in\n" + "\n".join(lines))
        return wrong

    def record(self, number: int, id_: str) -> dict[str, Any]:
        """Returns the document that the write of a number puts."""
        text = f"患者咳嗽三天 {id_} {self.token(number)}"
        return {"_id": id_, "text": text, "metadata": self.metadata(number, id_)}

    def token(self, number: int) -> str:
        """Returns the word that only texts of one write have."""
        return f"{self.name}w{number}x"

    def metadata(self, number: int, id_: str) -> dict[str, Any]:
        """Returns the metadata of a write."""
        return {"document": id_, "write": number, "group": f"{self.name}g{number % GROUPS}"}


class _Client:
    def __init__(self, history: History, random: Random, connections: int = 2) -> None:
        self.history, self.random = history, random
        self.connections = [history.service.connect() for _ in range(connections)]
        self.last: dict[str, Any] = {}

    def run(self) -> None:
        history, random = self.history, self.random
        kinds = {
            **{self.put: 24, self.put_list: 8, self.patch: 12, self.delete: 8},
            **{self.delete_list: 2, self.clear: 2, self.read: 30, self.search: 30, self.find: 10},
        }
        try:
            while (done := next(history.done)) < history.operations:
                if done in history.kill_at:
                    history.service.kill(random)
                (act,) = random.choices(list(kinds), list(kinds.values()))
                act(random.randrange(len(self.connections)), random.choice(history.ids))
        except Exception as error:
            history.errors.append(f"a client ended with {error!r}")
            raise

    def close(self) -> None:
        for connection in self.connections:
            connection.close()

    # Writes

    def put(self, slot: int, id_: str) -> None:
        number = next(self.history.numbers)
        record = self.history.record(number, id_)
        if self.random.random() < 0.1 and self.last:  # a client sends a request again
            record, number, id_ = self.last["record"], self.last["number"], self.last["id"]
        self.last = {"record": record, "number": number, "id": id_}
        match, headers = self.condition(id_)
        wait = "?wait=accepted" if match == ANY and self.random.random() < 0.1 else ""
        self.write(slot, "PUT", f"/documents{wait}", record, [(id_, "put", number, match)], headers)

    def put_list(self, slot: int, id_: str) -> None:
        """Puts some documents, among them some that are refused."""
        records: list[Any] = []
        parts, refused = [], []
        for one in self.random.sample(self.history.ids, 3):
            number = next(self.history.numbers)
            record = self.history.record(number, one)
            if self.random.random() < 0.3:
                refused.append(len(records))
                record |= self.random.choice([{"metadata": "none"}, {"title": 7}, {"text": None}])
            else:
                parts.append((one, "put", number, ANY))
            records.append(record)
        self.write(slot, "PUT", "/documents", records, parts, {}, refused)

    def patch(self, slot: int, id_: str) -> None:
        number = next(self.history.numbers)
        match, headers = self.condition(id_, absent=False)
        body = {"metadata": self.history.metadata(number, id_)}
        parts = [(id_, "patch", number, match)]
        self.write(slot, "PATCH", f"/documents/{id_}", body, parts, headers)

    def delete(self, slot: int, id_: str) -> None:
        match, headers = self.condition(id_, absent=False)
        self.write(slot, "DELETE", f"/documents/{id_}", None, [(id_, "delete", 0, match)], headers)

    def delete_list(self, slot: int, id_: str) -> None:
        ids = self.random.sample(self.history.ids, 2)
        parts = [(one, "delete", 0, ANY) for one in ids]
        self.write(slot, "POST", "/documents/delete", {"ids": ids}, parts, {})

    def clear(self, slot: int, id_: str) -> None:
        group = self.random.randrange(GROUPS)
        body = {"filter": {"group": f"{self.history.name}g{group}"}}
        parts = [(one, "clear", group, ANY) for one in self.history.ids]
        self.write(slot, "POST", "/documents/delete", body, parts, {})

    def condition(self, id_: str, *, absent: bool = True) -> tuple[Any, dict[str, str]]:
        """Returns what a write requires, and the headers that say so."""
        chance = self.random.random()
        if chance < 0.1 and absent:
            return ABSENT, {"If-None-Match": "*"}
        if chance < 0.2:
            return EXISTS, {"If-Match": "*"}
        state, tag = self.history.tags.get(id_, (None, ""))
        return (state, {"If-Match": tag}) if chance < 0.6 and tag else (ANY, {})

    def write(
        self,
        slot: int,
        method: str,
        path: str,
        body: Any,
        parts: list[tuple[str, str, int, Any]],
        headers: dict[str, str],
        refused: Sequence[int] = (),
    ) -> None:
        """Sends a write, and notes what it did to each document."""
        call = time.monotonic()
        status, _, answer = self.ask(slot, method, path, body, headers)
        if status == 202:
            status, answer = self.result(slot, answer["id"])
        ret, number = time.monotonic(), self.connections[slot].number
        if status == 0 or status >= 500:
            ret = inf
            if status and not self.killed(call - 1):
                self.wrong(f"{method} {path} has status {status}: {answer}")
        elif status == 200:
            found = [one["position"] for one in answer["rejected"]]
            counts = sum(answer[n] for n in ("added", "replaced", "unchanged", "deleted"))
            counts += len(answer["missing"])
            if found != list(refused) or (counts != len(parts) and parts[0][1:2] != ("clear",)):
                self.wrong(f"{method} {path} of {body} is answered by {answer}")
        elif status not in (404, 412):
            self.wrong(f"{method} {path} of {body} has status {status}: {answer}")
            return
        for id_, kind, value, match in parts:
            outcome = None
            if status in (404, 412):
                outcome = "missing" if status == 404 else "changed"
            elif ret < inf and id_ in answer["missing"]:
                outcome = "missing"
            elif ret < inf and kind == "delete":
                outcome = "deleted"
            elif ret < inf and len(parts) == 1:
                outcome = next(n for n in ("added", "replaced", "unchanged") if answer[n])
            self.note(id_, Event(kind, value, call, ret, number, outcome, match))

    def result(self, slot: int, id_: str) -> tuple[int, Any]:
        """Waits for an accepted write; the status is 0 if nobody knows what became of it."""
        started = time.monotonic()
        while True:
            status, _, answer = self.ask(slot, "GET", f"/writes/{id_}")
            if status == 404 and self.killed(started - 1):
                return 0, None
            if status != 200 or answer["state"] == "written":
                return status, answer["result"] if status == 200 else answer
            time.sleep(0.02)

    # Reads

    def read(self, slot: int, id_: str) -> None:
        call = time.monotonic()
        status, tag, answer = self.ask(slot, "GET", f"/documents/{id_}")
        if self.has_answer(slot, status, answer, 404):
            state = self.state(answer) if status == 200 else None
            if state:
                self.history.tags[id_] = state, tag
            self.found(slot, id_, Event("read", 0, call, time.monotonic(), 0, state))

    def search(self, slot: int, id_: str) -> None:
        """Reads a document by a word of its text, or by its metadata."""
        body: dict[str, Any] = {"query": id_, "mode": "lexical", "top_k": 3}
        if self.random.random() < 0.3:
            body = {"query": "咳嗽", "mode": "dense", "filter": {"document": id_}, "top_k": 3}
        self.find_by(slot, id_, body, None)

    def find(self, slot: int, id_: str) -> None:
        """Looks for the text of a write, which only its document can have."""
        number = next(self.history.numbers)
        last = [e.value for e in self.history.events[id_] if e.kind == "put"] or [number]
        value = self.random.choice(last[-2:])
        token = self.history.token(value)
        self.find_by(slot, id_, {"query": token, "mode": "lexical", "top_k": 3}, value)

    def find_by(self, slot: int, id_: str, body: Any, value: int | None) -> None:
        call = time.monotonic()
        status, _, answer = self.ask(slot, "POST", "/search", body)
        if not self.has_answer(slot, status, answer):
            return
        hits = answer["hits"]
        if [hit["id"] for hit in hits] not in ([], [id_]):
            self.wrong(f"{body} finds {hits}")
            return
        kind, outcome = ("read", self.state(hits[0]) if hits else None) if value is None else (
            "find", bool(hits)
        )  # fmt: skip
        self.found(slot, id_, Event(kind, value or 0, call, time.monotonic(), 0, outcome))

    def state(self, document: Any) -> State:
        (number,) = re.findall(rf"{self.history.name}w(\d+)x", document["text"])
        metadata = document["metadata"]
        if metadata != self.history.metadata(metadata["write"], document["id"]):
            self.wrong(f"{document} has other metadata than any write")
        return int(number), metadata["write"]

    def has_answer(self, slot: int, status: int, answer: Any, *others: int) -> bool:
        if status in (200, *others):
            return True
        opened = self.connections[slot].opened
        if status and not self.killed(opened, "service"):
            self.wrong(f"a read has status {status}: {answer}")
        return False

    def found(self, slot: int, id_: str, event: Event) -> None:
        self.note(id_, replace(event, connection=self.connections[slot].number))

    def note(self, id_: str, event: Event) -> None:
        with self.history.lock:
            self.history.events[id_].append(event)

    # Connections

    def ask(
        self,
        slot: int,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
    ) -> tuple[int, str, Any]:
        """Returns status, ETag and JSON; the status 0 if the connection is lost, and opens one."""
        connection = self.connections[slot]
        try:
            return connection.ask(method, path, body, headers or {})
        except (OSError, HTTPException) as error:
            if not self.killed(connection.opened, "worker", "service"):
                self.wrong(f"{method} {path} has no answer: {error!r}")
            connection.close()
            self.connections[slot] = self.history.service.connect()
            return 0, "", None

    def killed(self, since: float, *kinds: str) -> bool:
        """Returns whether a process of some kinds, or any, was killed since a time."""
        kills = self.history.service.kills
        return any(at >= since and (not kinds or kind in kinds) for at, kind in kills)

    def wrong(self, message: str) -> None:
        self.history.errors.append(message)
