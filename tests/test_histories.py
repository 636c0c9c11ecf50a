"""The check of histories: by hand-made ones, and with services that break a promise."""

import json
import time
from itertools import chain, count
from math import inf
from random import Random
from threading import Lock
from typing import Any

import pytest

from tests.histories import ABSENT, Event, History, contradiction

# What a fake service does wrong.
FAULTS = (
    "acknowledges early",  # a write is served only with the next one
    "one worker",  # a worker serves only some versions
    "goes back",  # some reads are of the version before
    "loses",  # the last version is lost when the writer is killed
    "ignores If-Match",
    "shows refused",  # a refused record is stored
    "old full text",  # a search by words finds what the version before had
)


class FakeService:
    """Two workers over versions in memory, as far as `History` uses a service."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.kills: list[tuple[float, str]] = []
        self.versions: list[dict[str, Any]] = [{}]
        self.served = [0, 0]
        self.opened = count()
        self.writing = Lock()
        self.dying = False

    def connect(self) -> "FakeConnection":
        return FakeConnection(self, next(self.opened))

    def kill(self, random: Random) -> None:
        with self.writing:
            self.kills.append((time.monotonic(), "writer"))
            self.dying = True
            if self.fault == "loses" and len(self.versions) > 1:
                self.publish(self.versions[-2])

    def publish(self, documents: dict[str, Any]) -> None:
        self.versions.append(documents)
        new = len(self.versions) - 1
        for worker in (0, 1):
            served = [new]
            if self.fault == "acknowledges early":
                served = [new - 1]
            elif self.fault == "one worker" and worker and new % 4:
                served = []
            for self.served[worker] in served:
                time.sleep(0.0005)


class FakeConnection:
    def __init__(self, service: FakeService, number: int) -> None:
        self.service, self.number, self.opened = service, number, time.monotonic()

    def close(self) -> None:
        """Does nothing."""

    def ask(self, method: str, path: str, body: Any, headers: dict[str, str]) -> Any:
        service, id_ = self.service, path.rpartition("/")[2]
        time.sleep(0.0002)
        served = service.served[self.number % 2]
        if service.fault == "goes back" and next(service.opened) % 8 == 0:
            served = max(0, served - 1)
        if method == "GET":
            document = service.versions[served].get(id_)
            return (200, tag(document), document) if document else (404, "", {})
        if path == "/search":
            lexical = body["mode"] == "lexical"
            old = lexical and service.fault == "old full text"
            found = service.versions[max(0, served - 1) if old else served].values()
            if lexical:
                hits = [one for one in found if body["query"] in one["text"].split()]
            else:
                hits = [one for one in found if one["id"] == body["filter"]["document"]]
            return 200, "", {"hits": hits}
        with service.writing:
            documents = dict(service.versions[-1])
            answer = apply(documents, method, id_, body, headers, service.fault)
            refused = {"code": answer} if isinstance(answer, int) else None
            dying, service.dying = service.dying, False
            if not refused and (not dying or len(service.versions) % 2):
                service.publish(documents)
        if dying:
            return 503, "", {}
        return (answer, "", refused) if refused else (200, "", answer)


def tag(document: Any) -> str:
    return json.dumps(document)


def apply(
    documents: dict[str, Any], method: str, id_: str, body: Any, headers: Any, fault: str
) -> Any:
    """Changes documents; returns the answer, or the status of an error."""
    answer = dict.fromkeys(("added", "replaced", "unchanged", "deleted"), 0)
    missing: list[str] = []
    refused: list[dict[str, int]] = []
    records = body if isinstance(body, list) else [body]
    key = records[0]["_id"] if method == "PUT" else id_
    old = documents.get(key)
    wanted = headers.get("If-Match")
    stale = wanted is not None and (old is None or wanted not in ("*", tag(old)))
    if (stale and fault != "ignores If-Match") or ("If-None-Match" in headers and old):
        return 412
    if method == "PATCH" and not old:
        return 404
    if method in ("PUT", "PATCH"):
        for position, record in enumerate(records):
            if method == "PATCH":
                record = {**documents[id_], "metadata": body["metadata"], "_id": id_}
            bad = not (record["text"] and record["metadata"] != "none" and "title" not in record)
            if bad:
                refused.append({"position": position})
                if fault != "shows refused" or not record["text"] or record["metadata"] == "none":
                    continue
            new = {"id": record["_id"], "text": record["text"], "metadata": record["metadata"]}
            before = documents.get(new["id"])
            if not bad:
                said = "added" if before is None else "unchanged" if before == new else "replaced"
                answer[said] += 1
            documents[new["id"]] = new
    else:
        ids = [id_] if method == "DELETE" else body.get("ids", [])
        if group := body and body.get("filter", {}).get("group"):
            ids = [one for one, d in documents.items() if d["metadata"]["group"] == group]
        missing = [one for one in ids if not documents.pop(one, None)]
        answer["deleted"] = len(ids) - len(missing)
    return {**answer, "missing": missing, "rejected": refused}


def run(fault: str, seed: int) -> tuple[list[str], History]:
    service = FakeService(fault)
    history = History(service, f"h{seed}", seed, operations=120, clients=8, documents=3, kills=3)
    return history.run(), history


def test_a_service_that_keeps_its_promises_has_no_violation() -> None:
    found: list[Event] = []
    for seed in range(5):  # the threads decide which outcomes one of them has
        wrong, history = run("", seed)
        assert wrong == []
        found += chain.from_iterable(history.events.values())
    outcomes = {event.outcome for event in found}
    assert {"added", "replaced", "deleted", "missing", "changed", None, False} <= outcomes
    assert any(event.ret == inf for event in found)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_service_that_breaks_a_promise_is_found(fault: str) -> None:
    assert any(run(fault, seed)[0] for seed in range(8))


def events(*given: tuple[Any, ...]) -> list[Event]:
    """Returns events of (connection, call, ret, kind, value, outcome, match)."""
    return [
        Event(kind, value, call, ret, connection, outcome, *match)
        for connection, call, ret, kind, value, outcome, *match in given
    ]


PUT = (1, 0, 1, "put", 1, "added")
ONE, TWO = (1, 1), (2, 2)
GOOD: dict[str, list[Any]] = {
    "read while written": [PUT, (2, 0.2, 0.4, "read", 0, None), (2, 0.5, 0.7, "read", 0, ONE)],
    # Another worker serves it earlier, before it is acknowledged.
    "two workers": [PUT, (2, 0.1, 0.2, "read", 0, ONE), (3, 0.3, 0.4, "read", 0, None)],
    "unknown, done": [PUT, (1, 2, inf, "put", 2, None), (2, 8, 9, "read", 0, TWO)],
    "unknown, not done": [PUT, (1, 2, inf, "put", 2, None), (2, 8, 9, "read", 0, ONE)],
    "unknown, late": [
        *(PUT, (1, 2, inf, "put", 2, None), (2, 3, 4, "read", 0, ONE)),
        (2, 8, 9, "read", 0, TWO),
    ],
    "one of two": [
        *(PUT, (1, 2, 4, "put", 2, "replaced", ONE), (2, 2, 4, "patch", 3, "changed", ONE)),
        (1, 5, 6, "read", 0, TWO),
    ],
    "cleared": [PUT, (1, 2, 3, "clear", 1, None), (1, 4, 5, "find", 1, False)],
}
BAD: dict[str, list[Any]] = {
    "lost": [PUT, (2, 2, 3, "read", 0, None)],
    "back": [PUT, (2, 0.1, 0.2, "read", 0, ONE), (2, 0.3, 0.4, "read", 0, None)],
    "from nowhere": [PUT, (2, 2, 3, "read", 0, TWO)],
    "torn": [PUT, (1, 2, 3, "put", 2, "replaced"), (1, 4, 5, "read", 0, (1, 2))],
    "before it was sent": [(2, 0, 1, "read", 0, ONE), (1, 2, 3, "put", 1, "added")],
    "back from the dead": [PUT, (1, 2, 3, "delete", 0, "deleted"), (2, 4, 5, "find", 1, True)],
    "not deleted": [PUT, (1, 2, 3, "clear", 1, None), (2, 4, 5, "read", 0, ONE)],
    "deleted by a clear of others": [
        *(PUT, (1, 2, 3, "clear", 0, None), (2, 4, 5, "read", 0, None)),
    ],
    "lost update": [
        *(PUT, (1, 2, 4, "put", 2, "replaced", ONE), (2, 2, 4, "put", 3, "replaced", ONE)),
    ],
    "both are the first": [PUT, (2, 0, 1, "put", 2, "added", ABSENT)],
    "happens twice": [
        *(PUT, (1, 2, inf, "put", 2, None), (2, 3, 4, "read", 0, TWO)),
        *((2, 5, 6, "put", 3, "replaced"), (2, 7, 8, "read", 0, TWO)),
    ],
    "wrong count": [PUT, (1, 2, 3, "put", 2, "added")],
}


@pytest.mark.parametrize("name", GOOD)
def test_an_order_explains_what_is_promised(name: str) -> None:
    assert contradiction(events(*GOOD[name])) is None


@pytest.mark.parametrize("name", BAD)
def test_no_order_explains_what_breaks_a_promise(name: str) -> None:
    given = events(*BAD[name])
    assert contradiction(given) in given
