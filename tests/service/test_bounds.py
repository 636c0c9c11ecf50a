"""Requests and answers within the limits, however they are made, are bounded in time and size."""

import asyncio
import gc
import json
import logging
from collections.abc import Callable, Coroutine, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import from_json, to_json

from core.filter_table import FilterTable
from search.hits import Hits, QueryResult
from service.app import create_app
from service.http.body import has_more
from service.routes.answers import are_short
from service.settings import Settings
from tests.conftest import make_records
from tests.encoders import BigramEncoder
from tests.service.asgi import Exchange, longest_callback
from tests.service.conftest import build_in

SEARCH, BATCH, EMBED = "/search", "/search/batch", "/v1/embeddings"
BODY = Settings.model_fields["max_body_bytes"].default
# The goal is 0.05 s on an idle machine; a busy machine may take twice as long.
LONGEST = 0.2


@pytest.fixture(scope="module")
def indexes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """400 documents of 1.3 kB; 64 queries for all of them return 40 MB."""
    records = make_records(400)
    for record in records:
        record["text"] += "患者应当注意饮食清淡，按时服药，定期复查。" * 20
    return build_in(tmp_path_factory.mktemp("long"), records)[0]


def run(indexes: Path, work: Any, **changes: Any) -> Any:
    """Runs a coroutine function of the application; the process is like a service's."""

    async def in_loop() -> Any:
        app = create_app(Settings(indexes=indexes, index="test", **changes), BigramEncoder())
        gc.collect()
        gc.freeze()
        try:
            async with app.router.lifespan_context(app), asyncio.timeout(100):
                return await work(app)
        finally:
            gc.unfreeze()

    return asyncio.run(in_loop())


@pytest.fixture(scope="module")
def send_all(indexes: Path) -> Iterator[Callable[[Any], Any]]:
    """Runs coroutine functions of one application, one after another."""
    app = create_app(Settings(indexes=indexes, index="test"), BigramEncoder())
    gc.collect()
    gc.freeze()
    with asyncio.Runner() as runner:
        lifespan = app.router.lifespan_context(app)
        runner.run(lifespan.__aenter__())
        yield lambda work: runner.run(work(app))
        runner.run(lifespan.__aexit__(None, None, None))
    gc.unfreeze()


def encoded(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


def repeated(start: str, part: str, end: str, size: int = BODY) -> bytes:
    count = (size - len(start) - len(end)) // len(part.encode())
    return f"{start}{part * count}{end}".encode()


def members(count: int) -> str:
    return ",".join(f'"field{i}":1' for i in range(count))


_INCLUDE = '{"query":"a","include":['
_FILTER = {f"f{i}": [f"value{j}" for j in range(100)] for i in range(16)}
_HUGE = {f"f{i}": [10**2500 + j for j in range(100)] for i in range(16)}
_LONG = [{"query": "ﷺ" * 1990 + str(i), "top_k": 1} for i in range(64)]

HOSTILE: dict[str, tuple[str, bytes, int]] = {
    "token ids": (EMBED, repeated('{"input":[1', ",1", "]}"), 413),
    "token ids of 1 MB": (EMBED, repeated('{"input":[1', ",1", "]}", 1 << 20), 413),
    "fewer token ids": (EMBED, repeated('{"input":[1', ",1", "]}", 200_000), 422),
    "deep": (EMBED, b'{"input":' + b"[" * 4_000_000, 413),
    "less deep": (EMBED, b'{"input":' + b"[" * 100_000, 400),
    "short texts": (EMBED, repeated('{"input":["a"', ',"a"', "]}"), 413),
    "texts of commas": (EMBED, repeated('{"input":[""', ',",,,,,,,,,,"', "]}"), 413),
    "one text": (EMBED, repeated('{"input":"', "中", '"}'), 422),
    "one text of escapes": (EMBED, repeated('{"input":"', "\\u4e2d", '"}'), 422),
    "one text of quotes": (EMBED, repeated('{"input":"', '\\\\\\",', '"}'), 422),
    "unknown fields": (EMBED, f"{{{members(110_000)}}}".encode(), 413),
    "fewer unknown fields": (EMBED, f"{{{members(8_000)}}}".encode(), 422),
    "included numbers": (SEARCH, repeated(_INCLUDE + "1", ",1", "]}"), 413),
    "fewer included numbers": (SEARCH, repeated(_INCLUDE + "1", ",1", "]}", 200_000), 422),
    "included texts": (SEARCH, repeated(_INCLUDE + '"text"', ',"text"', "]}", 900_000), 422),
    "repeated names": (SEARCH, repeated('{"query":"a"', ',"query":"a"', "}"), 413),
    "huge values": (SEARCH, encoded({"query": "a", "filter": _HUGE}), 422),
    "a huge number": (SEARCH, b'{"query":"a","top_k":' + b"9" * 4000 + b"}", 422),
    "a number of 4 MB": (SEARCH, repeated('{"query":"a","min_score":0.1', "1", "}"), 200),
    "white space": (SEARCH, repeated('{"query":"a"', " ", "}"), 200),
    "empty queries": (BATCH, repeated('{"queries":[{}', ",{}", "]}", 150_000), 422),
    "unknown fields of a query": (BATCH, f'{{"queries":[{{{members(8_000)}}}]}}'.encode(), 422),
    "full filters": (BATCH, encoded({"queries": [{"query": "a", "filter": _FILTER}] * 64}), 422),
    "long queries": (BATCH, encoded({"queries": _LONG}), 200),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_no_body_occupies_the_event_loop(
    send_all: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path, body, status = HOSTILE[name]
    assert len(body) <= BODY

    async def send(app: FastAPI) -> None:
        with longest_callback(monkeypatch) as longest:
            # A task, because a callback that has begun is not measured.
            exchange = await asyncio.create_task(Exchange(path, body).run(app))
        assert exchange.status == status
        assert longest[0] < LONGEST
        if status != 200:
            assert len(exchange.content) <= 4096
            assert len(json.loads(exchange.content)["errors"]) <= 16

    send_all(send)


QUESTIONS = [{"query": f"高血压{i}", "top_k": 400} for i in range(64)]
TEXTS = [f"孩子发烧{i}" for i in range(2048)]
LONG: dict[str, tuple[str, Any, int]] = {
    "batch": (BATCH, {"queries": QUESTIONS}, 30_000_000),
    "search": (SEARCH, QUESTIONS[0], 500_000),
    "embeddings": (EMBED, {"input": TEXTS}, 2_000_000),
    "base64": (EMBED, {"input": TEXTS, "encoding_format": "base64"}, 500_000),
}


@pytest.mark.parametrize("name", LONG)
def test_a_long_answer_is_made_outside_of_the_event_loop(
    indexes: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path, body, size = LONG[name]

    async def send(app: FastAPI) -> list[Exchange]:
        exchanges = []
        for _ in ("computed", "from the cache"):
            with longest_callback(monkeypatch) as longest:
                exchange = await asyncio.create_task(Exchange(path, encoded(body)).run(app))
            assert longest[0] < LONGEST
            exchanges.append(exchange)
        return exchanges

    for exchange in run(indexes, send, timeout_ms=60_000):
        assert exchange.status == 200
        assert len(exchange.content) > size
        assert max(map(len, exchange.parts)) < 500_000
        assert to_json(from_json(exchange.content)) == exchange.content


def test_an_answer_is_the_same_in_one_part_and_in_several(
    indexes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    included: list[list[str]] = [[], ["text"], ["metadata", "text"]]

    async def send(app: FastAPI) -> list[tuple[Any, int]]:
        found = []
        for include in included:
            query = {"query": "高血压", "top_k": 300, "include": include}
            for path, body in ((SEARCH, query), (BATCH, {"queries": [query, query]})):
                exchange = await Exchange(path, encoded(body)).run(app)
                answer = json.loads(exchange.content)
                for each in answer.get("results", [answer]):
                    del each["timings_ms"]
                found.append((answer, len(exchange.parts)))
        return found

    several = run(indexes, send, cache_entries=0)
    monkeypatch.setattr("service.routes.search.are_short", lambda _: True)
    monkeypatch.setattr("search.hits._FEW_HITS", 1000)
    one = run(indexes, send, cache_entries=0)
    assert [answer for answer, _ in one] == [answer for answer, _ in several]
    assert {parts for _, parts in one} == {1}
    wanted = [bool(include) for include in included for _ in (SEARCH, BATCH)]
    assert [parts > 1 for _, parts in several] == wanted


def test_documents_that_are_still_to_be_read_are_not_short() -> None:
    """Whether an answer is short is asked on the event loop, which must not wait for a disk."""
    rows = np.arange(65, 0, -1, dtype=np.float32), np.zeros(65, np.int64)
    unread = Hits(cast("Any", None), rows)
    assert not are_short([QueryResult(rows, unread, search=0, fetch=0, cached=False)])


class Reader:
    """A client that stops reading at the second part of a response."""

    def __init__(self) -> None:
        self.stopped = asyncio.Event()
        self.go_on = asyncio.Event()

    async def __call__(self, part: int) -> None:
        if part == 1:
            self.stopped.set()
            await self.go_on.wait()


def test_long_answers_are_limited_together(indexes: Path) -> None:
    """Of three, the second is rejected until the first is sent; a short one is not."""
    body = encoded({"queries": QUESTIONS[:8]})

    async def send(app: FastAPI) -> None:
        reader = Reader()
        first = asyncio.create_task(Exchange(BATCH, body, read=reader).run(app))
        await reader.stopped.wait()
        second = await Exchange(BATCH, body).run(app)
        assert (second.status, second.code) == (429, "overloaded")
        assert int(second.headers["retry-after"]) >= 1
        registry = app.state.service.metrics.registry
        rejected = {"reason": "answers"}
        assert registry.get_sample_value("care_rejections_total", rejected) == 1
        assert (await Exchange(SEARCH, encoded({"query": "发热"})).run(app)).status == 200
        reader.go_on.set()
        assert (await first).status == 200
        assert (await Exchange(BATCH, body).run(app)).status == 200

    run(indexes, send, max_answer_bytes=1_000_000)


def test_an_answer_stops_when_its_client_is_gone(
    indexes: Path, caplog: pytest.LogCaptureFixture
) -> None:
    body = encoded({"queries": QUESTIONS})

    async def send(app: FastAPI) -> None:
        reader = Reader()
        exchange = Exchange(BATCH, body, read=reader)
        sent = asyncio.create_task(exchange.run(app))
        await reader.stopped.wait()
        exchange.gone.set()
        await sent
        assert len(exchange.parts) == 1
        assert app.state.service.answers.usage.total == 0

    run(indexes, send)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_an_aborted_upload_is_not_an_error(indexes: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def send(app: FastAPI) -> None:
        exchange = await Exchange(SEARCH, b'{"query":', aborted=True).run(app)
        assert exchange.status == 0
        registry, labels = app.state.service.metrics.registry, {"route": SEARCH, "status": "499"}
        assert registry.get_sample_value("care_http_requests_total", labels) == 1

    run(indexes, send)
    (record,) = [record for record in caplog.records if hasattr(record, "fields")]
    assert record.levelno == logging.INFO
    assert record.__dict__["fields"]["status"] == 499


def test_the_description_of_an_index_is_read_when_it_is_loaded(
    indexes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def send(app: FastAPI) -> None:
        def fail(*_: object) -> None:
            raise AssertionError

        monkeypatch.setattr(FilterTable, "frequent_values", fail)
        exchange = await Exchange("/index", method="GET").run(app)
        assert json.loads(exchange.content)["filters"]["department"]

    run(indexes, send)


def more(body: bytes, values: int, names: int) -> bool:
    counted: Coroutine[Any, Any, bool] = has_more(bytearray(body), values, names)
    return asyncio.run(counted)


TEXT = st.text(st.sampled_from('a,:[{"\\中'), max_size=6)
VALUE = st.recursive(
    st.none() | st.integers() | TEXT,
    lambda of: st.lists(of, max_size=4) | st.dictionaries(TEXT, of, max_size=4),
    max_leaves=30,
)


def inside(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def values(value: Any) -> int:
    return 1 + sum(map(values, inside(value)))


def names(value: Any) -> int:
    own = len(value) if isinstance(value, dict) else 0
    return own + sum(map(names, inside(value)))


@given(VALUE, st.booleans())
def test_the_values_of_a_body_are_counted_without_parsing(value: Any, ascii_only: bool) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only).encode()
    count = values(value)
    assert not more(body, 2 * count, names(value))
    assert count < 3 or more(body, count - 2, len(body))
    assert not names(value) or more(body, len(body), names(value) - 1)


def test_the_values_of_a_long_body_are_counted() -> None:
    texts = ["，," * 10 + '"' * (i % 3) + "\\" * (i % 2) for i in range(20_000)]
    body = json.dumps({"input": texts}).encode()
    assert not more(body, len(texts) + 2, 1)
    assert more(body, len(texts) - 1, 1)
