"""The audit log."""

import json
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from pydantic import SecretStr

from core.errors import CareError
from service.observe.audit import AuditLog
from tests.conftest import ADMIN_KEY, SEARCH_KEY
from tests.errors import raises
from tests.service.conftest import Serve

QUERY = {"query": "绝密发热", "top_k": 3, "filter": {"department": "儿科"}}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def ask(client: TestClient, method: str, path: str, key: str, body: Any = None) -> None:
    headers = {"Authorization": f"Bearer {key}"}
    client.request(method, path, json=body, headers=headers)


def test_each_request_to_an_index_has_a_line(serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    client = serve(api_keys=SecretStr(f"{SEARCH_KEY},{ADMIN_KEY}"), audit_file=str(path))
    for _ in range(2):
        ask(client, "POST", "/search", "asks", QUERY)
    ask(client, "POST", "/search/batch", "asks", {"queries": [QUERY, QUERY | {"top_k": 1}]})
    ask(client, "POST", "/search", "asks", QUERY | {"filter": {"none": 1}})
    ask(client, "GET", "/documents/d0001", "asks")
    ask(client, "GET", "/documents/d9999", "asks")
    ask(client, "POST", "/index/reload", "asks")
    ask(client, "POST", "/search", "care_unknown", QUERY)
    for path_ in ("/health/live", "/", "/nowhere", "/v1/models"):
        ask(client, "GET", path_, "asks")
    found = [[line[n] for n in ("key", "index", "route", "status", "hits")] for line in lines(path)]
    assert found == [
        ["app", "test", "/search", 200, 3],
        ["app", "test", "/search", 200, 3],
        ["app", "test", "/search/batch", 200, 4],
        ["app", "test", "/search", 422, None],
        ["app", "test", "/documents/{id}", 200, 1],
        ["app", "test", "/documents/{id}", 404, None],
        ["app", "test", "/index/reload", 403, None],
        [None, None, "/search", 401, None],
    ]
    assert all(line.keys() >= {"time", "request_id"} for line in lines(path))
    for secret in ("绝密", "儿科", "d0001", "care_unknown"):
        assert secret not in path.read_text()


def test_a_file_that_is_renamed_is_made_again(serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    client = serve(audit_file=str(path))
    client.post("/search", json=QUERY)
    path.rename(tmp_path / "audit.jsonl.1")
    client.post("/search", json=QUERY)
    assert [len(lines(each)) for each in (path, tmp_path / "audit.jsonl.1")] == [1, 1]
    assert lines(path)[0]["key"] is None


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with raises(CareError, "audit_file_unwritable"):
        AuditLog(str(tmp_path / "none" / "audit.jsonl"))


def test_lines_go_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    log = AuditLog("-")
    log.write({"request_id": "1", "key": "a", "index": "b", "hits": 2}, "/search", "200")
    assert json.loads(capsys.readouterr().out)["hits"] == 2
    log.close()


def test_a_line_that_cannot_be_written_is_an_error_in_the_log_once(
    serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "audit"
    folder.mkdir()
    client = serve(audit_file=str(folder / "audit.jsonl"))
    folder.rename(tmp_path / "moved")
    for _ in range(3):
        assert client.post("/search", json=QUERY).status_code == 200
    logged = [(record.name, record.levelname) for record in caplog.records]
    assert logged.count(("care.service", "ERROR")) == 1
    folder.mkdir()
    assert client.post("/search", json=QUERY).status_code == 200
    assert len(lines(folder / "audit.jsonl")) == 1
