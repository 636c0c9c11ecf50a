"""Who may write what: roles, grants, rates, and the audit log."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from pydantic import SecretStr

from care.writer import Writer
from core.conditions import parse_filter
from service.access.api_keys import new_key
from tests.service.conftest import Serve
from tests.service.live import HeldLive, running_writer

INNER = {"department": "儿科"}
NEW = {"_id": "new", "text": "儿科门诊须知。", "metadata": INNER}
WRITES: list[tuple[str, str, Any]] = [
    ("PUT", "/documents", NEW),
    ("DELETE", "/documents/d0001", None),
    ("POST", "/documents/delete", {"ids": ["d0001"]}),
    ("PATCH", "/documents/d0001", {"metadata": {}}),
    ("GET", "/writes/none", None),
]


@pytest.fixture
def keyed(
    serve: Serve, live: HeldLive, tmp_path: Path
) -> Iterator[Callable[..., Callable[..., TestClient]]]:
    """Starts a service with a key for each list of grants, and returns its client with that key."""
    with running_writer(tmp_path, Writer(live, 1 << 20)) as writer:

        def start(**changes: Any) -> Callable[..., TestClient]:
            def with_key(*grants: dict[str, Any]) -> TestClient:
                secret, entry = new_key("k", "search", grants)
                file = tmp_path / "keys"
                file.write_text(entry)
                client = serve(writer=writer, api_keys_file=file, **changes)
                client.headers["Authorization"] = f"Bearer {secret}"
                return client

            return with_key

        yield start


@pytest.mark.parametrize(("method", "path", "body"), WRITES)
def test_a_write_needs_the_role(
    keyed: Callable[..., Any], live: HeldLive, method: str, path: str, body: Any
) -> None:
    searching = keyed()({"indexes": "*", "role": "search"})
    for prefix in ("", "/indexes/test"):
        refused = searching.request(method, prefix + path, json=body)
        assert (refused.status_code, refused.json()["code"]) == (403, "forbidden")
    elsewhere = keyed()({"indexes": "other", "role": "admin"})
    refused = elsewhere.request(method, f"/indexes/test{path}", json=body)
    assert (refused.status_code, refused.json()["code"]) == (404, "unknown_index")
    assert not live.writes
    for role in ("write", "admin"):
        allowed = keyed()({"indexes": "test", "role": role}).request(method, path, json=body)
        assert allowed.status_code not in (401, 403)


def test_a_key_of_one_line_may_write(serve: Serve, live: HeldLive, tmp_path: Path) -> None:
    secret, entry = new_key("k", "write")
    with running_writer(tmp_path, Writer(live, 1 << 20)) as writer:
        client = serve(writer=writer, api_keys=SecretStr(entry))
        headers = {"Authorization": f"Bearer {secret}"}
        assert client.put("/documents", json=NEW, headers=headers).json()["added"] == 1
        assert client.post("/index/reload", headers=headers).status_code in (401, 403)


def test_a_grant_bounds_what_may_be_written(keyed: Callable[..., Any], live: HeldLive) -> None:
    client = keyed()({"indexes": "test", "role": "write", "filter": INNER})
    assert client.put("/documents", json=NEW).json()["added"] == 1
    outside = NEW | {"_id": "out", "metadata": {"department": "骨科"}}
    foreign = NEW | {"_id": "d0000"}  # of another department
    for document in (outside, foreign):
        refused = client.put("/documents", json=document)
        assert (refused.status_code, refused.json()["code"]) == (403, "outside_grant")
    both = client.put("/documents", json=[foreign, NEW]).json()
    assert [each["code"] for each in both["rejected"]] == ["outside_grant"]
    assert both["unchanged"] == 1
    assert client.delete("/documents/d0000").json()["missing"] == ["d0000"]
    assert client.patch("/documents/d0000", json={"metadata": INNER}).status_code == 404
    assert client.patch("/documents/new", json={"metadata": {}}).status_code == 403
    deleted = client.post("/documents/delete", json={"filter": {"rare": False}}).json()
    assert 0 < deleted["deleted"] <= 20
    assert all(write.within == parse_filter(INNER) for write in live.writes)
    where = live.writes[-1].delete_where
    assert where == parse_filter(INNER) & parse_filter({"rare": False})


def test_the_grant_of_a_write_is_the_first_that_may_write(
    keyed: Callable[..., Any], live: HeldLive
) -> None:
    grants = [
        {"indexes": "*", "role": "search", "filter": {"department": "骨科"}},
        {"indexes": "*", "role": "write", "filter": INNER},
    ]
    client = keyed()(*grants)
    assert client.put("/documents", json=NEW).json()["added"] == 1
    assert client.get("/documents/new").status_code == 404
    assert live.writes[-1].within == parse_filter(INNER)


def test_each_document_is_charged_to_the_rate(keyed: Callable[..., Any]) -> None:
    client = keyed(rate_limit=0.01, rate_burst=5)({"indexes": "*", "role": "write"})
    documents = [NEW | {"_id": str(i)} for i in range(5)]
    assert client.put("/documents", json=documents).status_code == 200
    refused = client.put("/documents", json=NEW)
    assert (refused.status_code, refused.json()["code"]) == (429, "rate_limited")


def test_the_audit_log_has_numbers_of_documents(keyed: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "audit"
    client = keyed(audit_file=str(file))({"indexes": "*", "role": "write"})
    client.put("/documents", json=[NEW, {"_id": "bad"}])
    client.delete("/documents/new")
    first, second = map(json.loads, file.read_text().splitlines())
    assert (first["key"], first["index"], first["route"]) == ("k", "test", "/documents")
    counts = dict.fromkeys(("added", "replaced", "deleted", "unchanged", "missing", "rejected"), 0)
    assert first["written"] == counts | {"added": 1, "rejected": 1}
    assert second["written"] == counts | {"deleted": 1}
    assert "须知" not in file.read_text()
    assert '"new"' not in file.read_text()
