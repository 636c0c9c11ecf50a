"""`GET /documents`: the documents of an index, page by page, for administrators."""

from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from pydantic import SecretStr

from core.manifest import Chunking, IndexManifest
from service.access.api_keys import new_key
from tests.conftest import Builder, make_records
from tests.service.conftest import UNUSUAL_IDS, Serve

IDS = [record["_id"] for record in make_records(60)]
LONG = "".join(f"高血压患者第{i}号的护理要点。" for i in range(40))


def pages(client: TestClient, path: str = "/documents", **parameters: Any) -> list[dict[str, Any]]:
    """Returns all pages of a list, read one after another."""
    read: list[dict[str, Any]] = []
    while not read or read[-1]["next"] is not None:
        after = {"after": read[-1]["next"]} if read else {}
        response = client.get(path, params=parameters | after)
        assert response.status_code == 200, response.text
        read.append(response.json())
    return read


def ids(found: list[dict[str, Any]]) -> list[str]:
    return [document["id"] for page in found for document in page["documents"]]


@pytest.mark.parametrize("limit", [1, 7, 20, 60, 100])
def test_pages_have_each_document_once_in_order(
    client: TestClient, manifest: IndexManifest, limit: int
) -> None:
    found = pages(client, limit=limit)
    assert ids(found) == IDS
    assert len(found) == -(-60 // limit)
    for page in found:
        assert (page["total"], page["index"]["version"]) == (60, manifest.version)
    first = make_records(1)[0]
    expected = {"id": first["_id"], "title": first["title"], "chunks": None}
    assert found[0]["documents"][0] == expected


def test_without_parameters_the_first_twenty_are_listed(client: TestClient) -> None:
    answer = client.get("/documents").json()
    assert (ids([answer]), answer["next"]) == (IDS[:20], IDS[19])
    last = client.get("/documents", params={"after": IDS[-1]}).json()
    assert (last["documents"], last["next"]) == ([], None)


def test_ids_of_any_characters_are_cursors(serve: Serve, build_version: Builder) -> None:
    build_version([{"_id": id_, "text": f"文{i}"} for i, id_ in enumerate(UNUSUAL_IDS)])
    assert ids(pages(serve(), limit=1)) == list(UNUSUAL_IDS)


def test_a_document_that_is_split_is_listed_once(serve: Serve, build_version: Builder) -> None:
    records = [{"_id": "病历/1", "text": LONG}, {"_id": "short", "text": "骨折的护理。"}]
    build_version(records, chunking=Chunking(tokens=40, overlap=10))
    client = serve()
    found = pages(client, limit=1)
    assert ids(found) == ["病历/1", "short"]
    chunks = [document["chunks"] for page in found for document in page["documents"]]
    assert chunks == [len(client.get("/documents/病历%2F1").json()["passages"]), 1]
    # The cursor may be any chunk of a document.
    assert ids(pages(client, after="病历/1#2")) == ["short"]


@pytest.mark.parametrize(
    ("parameters", "status", "code", "field"),
    [
        ({"after": "patient-17"}, 404, "unknown_document", None),
        ({"after": ""}, 404, "unknown_document", None),
        ({"limit": 0}, 422, "invalid_request", "limit"),
        ({"limit": 101}, 422, "invalid_request", "limit"),
        ({"limit": "all"}, 422, "invalid_request", "limit"),
    ],
)
def test_a_wrong_parameter_is_an_error_that_does_not_quote_it(
    client: TestClient, parameters: dict[str, Any], status: int, code: str, field: str | None
) -> None:
    response = client.get("/documents", params=parameters)
    problem = response.json()
    assert (response.status_code, problem["code"]) == (status, code)
    assert [error["field"] for error in problem["errors"]] == ([field] if field else [])
    assert "patient" not in response.text


def test_a_list_needs_the_role_admin_in_its_index(
    serve: Serve, build_version: Builder, tmp_path: Path
) -> None:
    build_version(make_records(20))
    build_version(make_records(30), name="ward")
    operator, operator_entry = new_key("operator", "admin")
    writer, writer_entry = new_key("writer", "write")
    (tmp_path / "keys").write_text(f"""
[[key]]
name = "operator"
sha256 = "{operator_entry.rpartition(":")[2]}"
grant = [{{ indexes = "ward", role = "admin" }}, {{ indexes = "*", role = "search" }}]

[[key]]
name = "writer"
sha256 = "{writer_entry.rpartition(":")[2]}"
grant = [{{ indexes = "ward", role = "write" }}]
""")
    client = serve(api_keys_file=tmp_path / "keys", rate_limit=0.001, rate_burst=3)

    def ask(secret: str, path: str) -> tuple[int, str]:
        response = client.get(path, headers={"Authorization": f"Bearer {secret}"})
        return response.status_code, response.json().get("code", "")

    assert ask(operator, "/indexes/ward/documents") == (200, "")
    assert ask(operator, "/documents") == (403, "forbidden")
    assert ask(operator, "/indexes/none/documents") == (403, "forbidden")
    assert ask(writer, "/indexes/ward/documents") == (403, "forbidden")
    assert ask(writer, "/indexes/test/documents") == (404, "unknown_index")
    assert client.get("/indexes/ward/documents").status_code == 401
    # Each page costs one query of the rate.
    assert ask(operator, "/indexes/ward/documents?limit=1")[0] == 200
    assert ask(operator, "/indexes/ward/documents?after=none")[0] == 404
    assert ask(operator, "/indexes/ward/documents") == (429, "rate_limited")


def test_without_a_key_only_clients_of_this_machine_list(serve: Serve) -> None:
    client = serve(host="0.0.0.0")
    assert client.get("/documents").json()["code"] == "needs_key"
    client = serve(api_keys=SecretStr(new_key("app", "search")[1]))
    assert client.get("/documents").json()["code"] == "unauthorized"
