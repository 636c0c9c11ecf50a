"""What RFC 9110 and 9112 require of every route, over sockets; the routes come from the service."""

import gzip
import json
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import SecretStr
from starlette.routing import Mount, Route

from core.manifest import IndexManifest
from service.app import create_app, openapi_document
from service.settings import Settings
from tests.conftest import ADMIN_KEY
from tests.encoders import BigramEncoder
from tests.service.asgi import longest_callback
from tests.service.sockets import serving, until
from tests.service.test_problems import FailingEncoder

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]

BOM = b"\xef\xbb\xbf"
MIB = 1 << 20
ORIGIN = "https://clinic.example"
# A new parameter of a path needs a value here, and a new folder of files one of its files.
PARAMETERS = {"{id}": "d0007", "{index}": "test", "{model}": "care-mini"}
FILES = {"/page": "/page/search.js", "/page/swagger": "/page/swagger/swagger-ui.css"}
DOCUMENT = openapi_document()
# A path of POST that is one of a document for other methods; test_writes.py sends its bodies.
DELETE = "/documents/delete"

Answer = tuple[int, dict[str, str], bytes]
Ask = Callable[..., Awaitable[Answer]]


def body_schema(operation: dict[str, Any]) -> dict[str, Any]:
    reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    schema: dict[str, Any] = DOCUMENT["components"]["schemas"][reference.rpartition("/")[2]]
    return schema


SCHEMAS = {
    path.replace("{index}", PARAMETERS["{index}"]): body_schema(operations["post"])
    for path, operations in DOCUMENT["paths"].items()
    if "requestBody" in operations.get("post", {}) and not path.endswith(DELETE)
}
EXAMPLES = {path: schema["examples"][0] for path, schema in SCHEMAS.items()}
BODIES = {path: json.dumps(example).encode() for path, example in EXAMPLES.items()}


@pytest.fixture
def app(settings: Settings, manifest: IndexManifest) -> FastAPI:
    """The service, open to pages of one origin."""
    return create_app(settings.model_copy(update={"cors_origins": (ORIGIN,)}), BigramEncoder())


@asynccontextmanager
async def asking(app: FastAPI) -> AsyncIterator[Ask]:
    """Yields a function that sends one request, and nothing else, on a connection.

    The function takes method and path, the body and lines of headers; the first one is Host.
    """

    async def ask(
        line: str,
        body: bytes = b"",
        *headers: str,
        host: str = "Host: [::1]",
        version: str = "1.1",
    ) -> Answer:
        lines = [f"{line} HTTP/{version}", host, *headers, "Connection: close"]
        if body:
            lines.append(f"Content-Length: {len(body)}")
        client = await server.connect()
        await client.send("\r\n".join(filter(None, lines)).encode() + b"\r\n\r\n" + body)
        status, fields, content = await client.answer(head=line.startswith("HEAD"))
        return status, fields, content + await client.reader.read()

    origins = app.state.service.settings.cors_origins
    async with app.router.lifespan_context(app), serving(app, origins) as server:
        yield ask


@pytest.fixture
async def ask(app: FastAPI) -> AsyncIterator[Ask]:
    async with asking(app) as ask:
        yield ask


def code(answer: Answer) -> tuple[int, str]:
    problem = json.loads(answer[2])
    assert answer[1]["content-type"] == "application/problem+json"
    assert answer[1]["x-request-id"] == problem["request_id"]
    return answer[0], problem["code"]


def paths_of(app: FastAPI, method: str) -> dict[str, str]:
    """The paths of the routes of a method, and of a file of each folder, by those of metrics."""
    paths = {}
    for route in app.routes:
        if isinstance(route, Mount):
            if method == "GET":
                paths[FILES[route.path]] = "unmatched"
        elif isinstance(route, Route) and method in (route.methods or ()):
            path = route.path_format
            for name, value in PARAMETERS.items():
                path = path.replace(name, value)
            paths[path] = route.path_format if isinstance(route, APIRoute) else "unmatched"
    return paths


async def test_each_route_of_get_answers_head_without_content(ask: Ask, app: FastAPI) -> None:
    paths = {p: route for p, route in paths_of(app, "GET").items() if "/writes/" not in p}
    assert {"/health/live", "/metrics", "/index", "/documents/d0007", "/", "/openapi.json"} <= {
        *paths
    }
    registry = app.state.service.metrics.registry

    def counted(route: str) -> float:
        labels = {"route": route, "status": "200"}
        return registry.get_sample_value("care_http_requests_total", labels) or 0

    for path in paths:
        status, fields, content = await ask(f"GET {path}")
        assert (status, len(content)) == (200, int(fields["content-length"])), path
        status, found, content = await ask(f"HEAD {path}")
        assert (status, content) == (200, b""), path
        for changes in (fields, found):
            del changes["x-request-id"]
            if path == "/metrics":
                assert int(changes.pop("content-length")) > 1000
        assert found == fields, path
        refused = await ask(f"TRACE {path}")
        assert code(refused) == (405, "method_not_allowed")
        allowed = set(refused[1]["allow"].split(", "))
        writes: set[str] = set()
        if "/documents" in path:
            writes = {"PATCH", "DELETE"} if "/documents/" in path else {"PUT"}
        elif path == "/indexes/test":
            writes = {"PUT", "DELETE"}
        assert allowed == {"GET", "HEAD", *writes}, path
    # Files are counted once they are closed.
    expected = {route: 2 * number for route, number in Counter(paths.values()).items()}
    await until(lambda: {route: counted(route) for route in expected} == expected)
    for path in paths_of(app, "POST"):
        if path.endswith(DELETE):
            continue
        status, fields, content = await ask(f"HEAD {path}")
        assert (status, fields["allow"], content) == (405, "POST", b""), path
    methods = {m for each in DOCUMENT["paths"].values() for m in each}
    assert methods == {"post", "get", "put", "patch", "delete"}


async def test_a_path_with_a_slash_too_many_is_unknown(ask: Ask, app: FastAPI) -> None:
    """A redirect would lead from TLS to the host that the client names."""
    paths = [*paths_of(app, "GET"), *paths_of(app, "POST")]
    routes = [path for path in paths if path not in FILES.values() and path != "/"]
    unknown = [*(f"{path}/" for path in routes), *FILES, *(f"//evil.example{p}" for p in paths)]

    for path in unknown:
        for method in ("GET", "HEAD", "POST"):
            status, fields, content = await ask(f"{method} {path}", host="Host: evil.example")
            assert (status in (404, 405), "location" in fields) == (True, False), path
            assert b"evil" not in content


def bare(body: bytes) -> bytes:
    """Deflate without the header of zlib."""
    return zlib.compress(body, wbits=-15)


def damaged(body: bytes) -> bytes:
    coded = bytearray(gzip.compress(body))
    coded[-6] ^= 1  # of the checksum
    return bytes(coded)


UNSUPPORTED = (415, "unsupported_content_encoding")
INVALID = (400, "invalid_content_encoding")
TOO_LONG = (413, "body_too_long")
# Codings, what encodes a body, and the expected problem, if any.
CODINGS: list[tuple[str, Callable[[bytes], bytes], tuple[int, str] | None]] = [
    *((name, gzip.compress, None) for name in ("gzip", "X-GZIP", "identity, GZip")),
    *(("deflate", encode, None) for encode in (zlib.compress, bare)),
    *((name, bytes, None) for name in ("", "identity", " , Identity")),
    *((name, bytes, UNSUPPORTED) for name in ("br", "zstd")),
    *((name, gzip.compress, UNSUPPORTED) for name in ("gzip, gzip", "deflate, gzip")),
    ("gzip\r\nContent-Encoding: br", gzip.compress, UNSUPPORTED),
    *(("gzip", encode, INVALID) for encode in (bytes, zlib.compress, damaged)),
    *(("deflate", encode, INVALID) for encode in (bytes, gzip.compress)),
    ("gzip", lambda body: gzip.compress(body)[:-9], INVALID),
    ("gzip", lambda body: gzip.compress(body)[:1], INVALID),
    ("gzip", lambda body: gzip.compress(body) + b"a", INVALID),
    ("deflate", lambda body: zlib.compress(body)[:-1], INVALID),
    ("gzip", lambda body: gzip.compress(b"no JSON"), (400, "invalid_json")),
    ("gzip", lambda body: gzip.compress(b""), (422, "invalid_request")),
    ("gzip", lambda body: b"", (422, "invalid_request")),
    ("gzip", lambda body: gzip.compress(body + bytes(64 * MIB)), TOO_LONG),
    ("deflate", lambda body: bare(body + bytes(64 * MIB)), TOO_LONG),
    # A stream of empty parts, which decodes to nothing.
    ("deflate", lambda body: b"\0\0\0\xff\xff" * MIB, TOO_LONG),
]


async def test_each_body_is_read_in_each_supported_coding_and_others_are_refused(ask: Ask) -> None:
    for number, (coding, encode, expected) in enumerate(CODINGS):
        for path, body in BODIES.items():
            for content in (body, BOM + body)[: 1 if expected else 2]:
                answer = await ask(f"POST {path}", encode(content), f"Content-Encoding: {coding}")
                if not expected:
                    assert answer[0] == 200, (number, path, answer[2])
                    continue
                assert code(answer) == expected, (number, path)
                accepted = "gzip, deflate" if expected == UNSUPPORTED else None
                assert answer[1].get("accept-encoding") == accepted


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_the_longest_coded_body_does_not_hold_the_event_loop(
    ask: Ask, app: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = app.state.service.settings.max_body_bytes

    body = BODIES["/search"]
    coded = gzip.compress(b" " * (limit - len(body)) + body)
    assert len(coded) < limit // 500
    answer = await ask("POST /search", coded, "Content-Encoding: gzip")
    assert answer[0] == 200
    with longest_callback(monkeypatch) as longest:
        answer = await ask("POST /search", coded, "Content-Encoding: gzip")
    assert answer[0] == 200
    assert longest[0] < 0.1


async def test_a_coded_body_must_arrive_before_the_deadline(
    settings: Settings, manifest: IndexManifest
) -> None:
    app = create_app(settings.model_copy(update={"timeout_ms": 50}), BigramEncoder())
    async with asking(app) as ask:
        for path in BODIES:
            answer = await ask(f"POST {path}", b"", "Content-Encoding: gzip", "Content-Length: 9")
            assert code(answer) == (504, "deadline_exceeded")


async def test_null_stands_for_each_default(ask: Ask) -> None:
    """Typed clients send null for what is unset."""
    for path, schema in SCHEMAS.items():
        example = EXAMPLES[path]
        optional = dict.fromkeys(schema["properties"].keys() - schema["required"])
        changes = [optional, *({name: None} for name in optional)]
        for change in changes:
            answer = await ask(f"POST {path}", json.dumps(example | change).encode())
            assert answer[0] == 200, (path, change, answer[2])
        for name in schema["required"]:
            answer = await ask(f"POST {path}", json.dumps(example | {name: None}).encode())
            assert code(answer) == (422, "invalid_request"), (path, name)
        for name, field in schema["properties"].items():
            nullable = {"type": "null"} in field.get("anyOf", ())
            assert nullable == (name in optional), (path, name)

    optional = SCHEMAS["/search"]["properties"].keys() - {"query"}
    batch = {"queries": [{"query": "咳嗽"} | dict.fromkeys(optional)]}
    assert (await ask("POST /search/batch", json.dumps(batch).encode()))[0] == 200


LONG = "a" * 20_000


ERRORS = [
    ("GET /nowhere", [], (404, "not_found")),
    ("GET /page/missing.js", [], (404, "not_found")),
    ("GET /search", [], (405, "method_not_allowed")),
    ("POST /search", ["Content-Type: text/plain"], (415, "unsupported_media_type")),
    ("POST /search", ["Content-Encoding: br"], UNSUPPORTED),
    ("POST /search", [], (500, "internal_error")),
    ("GET /health/live", ["Host: b"], (400, "invalid_http")),
    ("GET /health/live", ["X : a"], (400, "invalid_http")),
    ("GET /health/live", ["Expect: else"], (417, "expectation_failed")),
    (f"GET /{LONG[:9000]}", [], (414, "url_too_long")),
    ("GET /health/live", [f"X: {LONG}"], (431, "headers_too_long")),
]


async def test_pages_of_other_origins_can_read_every_error(
    settings: Settings, manifest: IndexManifest
) -> None:
    encoder = FailingEncoder()
    app = create_app(settings.model_copy(update={"cors_origins": (ORIGIN,)}), encoder)
    encoder.failing = True
    async with asking(app) as ask:
        for line, headers, expected in ERRORS:
            body = BODIES["/search"] if line.startswith("POST") else b""
            answer = await ask(line, body, f"Origin: {ORIGIN}", *headers)
            assert code(answer) == expected
            assert answer[1]["access-control-allow-origin"] == ORIGIN, expected
            exposed = answer[1]["access-control-expose-headers"].lower().split(", ")
            assert {"x-request-id", "retry-after"} <= {*exposed}, expected
            for other in (["Origin: https://other.example"], []):
                answer = await ask(line, body, *other, *headers)
                assert code(answer) == expected
                assert "access-control-allow-origin" not in answer[1], expected
                assert answer[1]["vary"] == "Origin", expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"max_requests": 0}, (503, "too_many_requests")),
        ({"api_keys": SecretStr(ADMIN_KEY)}, (401, "unauthorized")),
        ({"max_body_bytes": 8}, (413, "body_too_long")),
    ],
)
async def test_pages_of_other_origins_can_read_what_limits_refuse(
    settings: Settings,
    manifest: IndexManifest,
    changes: dict[str, Any],
    expected: tuple[int, str],
) -> None:
    changed = settings.model_copy(update={"cors_origins": ("*",), **changes})
    async with asking(create_app(changed, BigramEncoder())) as ask:
        answer = await ask("POST /search", BODIES["/search"], f"Origin: {ORIGIN}")
        assert code(answer) == expected
        assert answer[1]["access-control-allow-origin"] == ORIGIN


async def test_pages_of_other_origins_may_send_headers_of_tracing(ask: Ask) -> None:
    names = {"authorization", "content-type", "content-encoding", "x-request-id", "baggage"}
    names |= {"x-request-timeout-ms", "traceparent", "tracestate", "x-datadog-trace-id", "b3"}

    async def preflight(ask: Ask, origin: str, method: str) -> Answer:
        asked = ["Access-Control-Request-Headers: " + ",".join(sorted(names))]
        asked.append(f"Access-Control-Request-Method: {method}")
        return await ask("OPTIONS /search", b"", f"Origin: {origin}", *asked)

    status, fields, _ = await preflight(ask, ORIGIN, "POST")
    assert status == 200
    assert fields["access-control-allow-origin"] == ORIGIN
    assert set(fields["access-control-allow-headers"].split(",")) == names
    allowed = {*fields["access-control-allow-methods"].split(", ")}
    assert allowed == {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"}
    for method in sorted(allowed):
        status, fields, _ = await preflight(ask, ORIGIN, method)
        assert (status, fields["access-control-allow-origin"]) == (200, ORIGIN)
    refused = await preflight(ask, ORIGIN, "TRACE")
    assert code(refused) == (400, "cors_refused")
    assert refused[1]["access-control-allow-origin"] == ORIGIN
    refused = await preflight(ask, "https://other.example", "POST")
    assert code(refused) == (400, "cors_refused")
    assert "access-control-allow-origin" not in refused[1]


HOSTS = [
    *("a", "a.example:8000", "127.0.0.1:8000", "[::1]", "[2001:db8::1]:443", "a_b~c", "a:"),
    *("%E4%B8%AD.example", "[::ffff:192.0.2.1]", "[v1.a:b]", "", " a \t"),
]
NO_HOSTS = [
    *("a b", "a/b", "http://a", "a@b", "a:b", "a:80:80", "::1", "[::1", "[::1]a", "[fe80::1%25e]"),
    *("[1]", "[]", "中.example", "a,\tb", "a?b", "%zz", "a\\b", '"a"', "<a>", "[v1]"),
]


# Request lines with versions, headers, and the expected status.
HEADS: list[tuple[str, list[str], int]] = [
    *(("GET /health/live 1.1", [f"Host: {host}"], 200) for host in HOSTS),
    *(("GET /health/live 1.1", [f"Host: {host}"], 400) for host in NO_HOSTS),
    ("GET /health/live 1.0", [], 200),
    ("GET /health/live 1.0", ["Host: a b"], 400),
    ("GET /health/live 1.1", [], 400),
    ("HEAD /health/live 1.1", [], 400),
    ("GET /health/live 1.1", ["Host: a", "HOST: a"], 400),
    ("GET /health/live 1.0", ["Host: a", "Host: a"], 400),
    ("GET /health/live 2.0", ["Host: a"], 400),
    # The authority of a target in absolute form; Host is needed all the same.
    ("GET http://b:80/health/live?a=b 1.1", ["Host: a"], 200),
    ("GET HTTPS://[::1]/health/live 1.1", ["Host: a"], 200),
    ("GET http://b/health/live 1.0", [], 200),
    ("GET http://a_b 1.1", ["Host: a"], 200),
    ("GET http://b?c 1.1", ["Host: a"], 200),
    ("GET http://b/health/live 1.1", [], 400),
    ("GET http://b/health/live 1.1", ["Host: a b"], 400),
    ("GET http://u@b/health/live 1.1", ["Host: a"], 400),
    ("GET http://:80/health/live 1.1", ["Host: a"], 400),
    ("GET http:///health/live 1.1", ["Host: a"], 400),
    ("GET ftp://b/health/live 1.1", ["Host: a"], 400),
    ("GET * 1.1", ["Host: a"], 400),
    ("OPTIONS * 1.1", ["Host: a"], 404),
    # Headers with one value.
    ("GET /index 1.1", ["Host: a", "Authorization: a", "Authorization: a"], 200),
    ("GET /index 1.1", ["Host: a", "Authorization: a", "Authorization: b"], 400),
    ("GET /index 1.1", ["Host: a", "Content-Type: a", "Content-Type: b"], 400),
    ("GET /index 1.1", ["Host: a", "X-Request-Timeout-Ms: 9", "X-Request-Timeout-Ms: 8"], 400),
    ("GET /index 1.1", ["Host: a", "Content-Length: 0", "Content-Length: 0"], 400),
    ("GET /index 1.1", ["Host: a", "X-Request-Id: a", "X-Request-Id: b"], 200),
    ("GET /documents/d0007 1.1", ["Host: a", "X-Request-Timeout-Ms: 9000 \t"], 200),
    ("GET /index 1.1", ["Host: a", "Expect: 100-Continue"], 200),
    ("GET /index 1.1", ["Host: a", "Expect: 200-ok"], 417),
    ("GET /index 1.0", ["Expect: 200-ok"], 200),
    ("GET /index 1.1", ["Host: a", "TE: trailers, gzip;q=0.5"], 200),
]


async def test_heads_are_checked(ask: Ask) -> None:
    for head, headers, status in HEADS:
        line, _, version = head.rpartition(" ")
        answer = await ask(line, b"", *headers, host="", version=version)
        assert answer[0] == status, (head, headers)
        if line.startswith("HEAD"):
            assert answer[2] == b""
        elif status == 400:
            assert code(answer) == (400, "invalid_http"), (head, headers)
