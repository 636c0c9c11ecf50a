import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from pydantic import SecretStr

from care.diagnosis.finding import Finding
from care.diagnosis.serving import (
    check_pair,
    check_port,
    check_redis,
    check_reranker,
    check_serving,
)
from service.settings import Settings
from tests.conftest import Builder, make_records
from tests.encoders import BigramEncoder
from tests.indexer.builds import edit_manifest, to_schema_2
from tests.redis_server import run_redis
from tests.service.test_rerank import reranker


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch, indexes: Path) -> None:
    for name, value in {"INDEXES": str(indexes), "INDEX": "test", "PORT": "0"}.items():
        monkeypatch.setenv(f"CARE_{name}", value)
    monkeypatch.setattr("care.diagnosis.serving.load_query_encoder", lambda _: BigramEncoder())


def findings(*, index_required: bool = True) -> dict[str, Finding]:
    return {finding.check: finding for finding in check_serving(index_required=index_required)}


def test_an_index_that_can_be_served_is_ok(build_version: Builder) -> None:
    version = build_version(make_records(20)).version
    found = findings()
    assert {finding.status for finding in found.values()} == {"ok"}
    assert found.keys() == {"settings", "workers", "pair", "index", "port"}
    assert version in found["index"].message


def test_a_missing_index_is_an_error_if_it_was_named() -> None:
    for required, status in ((True, "error"), (False, "warning")):
        finding = findings(index_required=required)["index"]
        assert finding.status == status
        assert "[no_active_version]" in finding.message


def test_a_damaged_index_and_one_of_another_space_are_errors(
    build_version: Builder, indexes: Path
) -> None:
    version = build_version(make_records(20), space="other-1").version
    assert "[embedding_space_mismatch]" in findings()["index"].message
    (indexes / "test" / version / "documents.arrow").write_bytes(b"")
    build_version(make_records(20))
    (indexes / "test" / "CURRENT").write_text(f"{version}\n")
    assert findings()["index"].status == "error"


def test_an_old_manifest_is_a_warning_that_names_the_command(
    build_version: Builder, indexes: Path
) -> None:
    version = build_version(make_records(20)).version
    edit_manifest(indexes / "test" / version, to_schema_2)
    finding = findings()["index"]
    assert finding.status == "warning"
    assert "care versions migrate --index test" in finding.advice


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("CARE_PROT", "1", "unknown_setting"),
        ("CARE_PORT", "http", "invalid_setting"),
        ("CARE_API_KEYS", "app:search:short", "invalid_key_hash"),
    ],
)
def test_wrong_variables_are_one_error(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, code: str
) -> None:
    monkeypatch.setenv(name, value)
    (finding,) = findings().values()
    assert (finding.check, finding.status) == ("settings", "error")
    assert finding.message.endswith(f"[{code}]")


def test_a_port_of_kubernetes_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARE_PORT", "tcp://10.0.0.1:8000")
    found = findings()
    assert found["settings"].status == "warning"
    assert found["port"].message.startswith("127.0.0.1:8000 ")


def test_the_variable_of_builds_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARE_BUILDS", "builds")
    assert findings()["settings"].status == "ok"


def test_an_unknown_pair_is_an_error() -> None:
    encoder, finding = check_pair(Settings(pair="none"))
    assert encoder is None
    assert finding.message.endswith("[unknown_pair]")


def test_a_document_encoder_with_other_files_is_an_error(pair_file: Path) -> None:
    encoder, finding = check_pair(Settings(pair=str(pair_file)))
    assert encoder is None
    assert finding.message.endswith("[missing_file]")


def test_redis_is_asked(tmp_path: Path) -> None:
    with run_redis(tmp_path) as server:
        assert check_redis(Settings(redis_url=server.url, cache_secret="s")).status == "ok"
    url = server.url.replace("//", "//user:hidden@")
    finding = check_redis(Settings(redis_url=url, cache_secret="s"))
    assert finding.status == "error"
    assert "hidden" not in finding.message + finding.advice


def test_the_reranking_server_is_asked() -> None:
    with reranker() as (url, bodies):
        finding = check_reranker(Settings(rerank_url=SecretStr(url), rerank_model="m"))
        assert (finding.status, len(bodies), bodies[0]["model"]) == ("ok", 1, "m")
    stopped = check_reranker(Settings(rerank_url=SecretStr(url)))
    assert stopped.status == "error" and stopped.advice
    wrong = check_reranker(Settings(rerank_url=SecretStr("http://user:hidden@host")))
    assert wrong.status == "error"
    assert "hidden" not in wrong.message


class _Live(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"status": "live"}).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def service_port() -> Iterator[int]:
    """The port of a server that answers as a service."""
    with HTTPServer(("127.0.0.1", 0), _Live) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def redis_at(port: int) -> Finding:
    url = SecretStr(f"redis://127.0.0.1:{port}")
    return check_redis(Settings(redis_url=url, cache_secret=SecretStr("s")))


@pytest.mark.parametrize("check", [lambda port: check_port(Settings(port=port)), redis_at])
@pytest.mark.parametrize("sent", [b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 10_000, b"", b"HTTP/1.1"])
def test_what_listens_may_send_anything(
    sent: bytes, check: Callable[[int], Finding], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an end, or so slowly that a time-out of each part would not be reached."""
    monkeypatch.setattr("care.diagnosis.serving._TIMEOUT", 0.5)
    ended = threading.Event()

    def serve() -> None:
        connection, _ = server.accept()
        with connection, suppress(OSError):
            while not ended.wait(0.1):
                connection.sendall(sent or b"+")

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        started = time.monotonic()
        assert check(server.getsockname()[1]).status == "error"
        assert time.monotonic() - started < 10
        ended.set()
        thread.join()


def test_a_port_is_free_held_by_a_service_or_taken(service_port: int) -> None:
    assert check_port(Settings(port=service_port)).status == "ok"
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        finding = check_port(Settings(port=port))
    assert finding.status == "error"
    assert str(port) in finding.message
    assert check_port(Settings(port=port)).status == "ok"
    assert check_port(Settings(host="192.0.2.1")).status == "error"
