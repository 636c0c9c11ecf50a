"""No caller sees a document outside of its grants, whatever is asked and cached."""

import shutil
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from httpx2 import Response
from pydantic import SecretStr

from core.documents import DocumentReader
from core.manifest import Chunking, IndexManifest
from search import query as query_checks
from service.access.api_keys import new_key
from service.pipeline import cache, engine
from service.routes import documents
from service.settings import Settings
from tests.redis_server import run_redis
from tests.service.conftest import Serve, build_in
from tests.service.visibility import Attack, Report, records

STEPS = 150
CACHES = [{}, {"cache_entries": 0}, {"cache_entries": 3}]


@pytest.fixture(scope="module")
def built_versions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[IndexManifest]]:
    folder = tmp_path_factory.mktemp("versions")
    options: list[dict[str, Any]] = [{"fusion": {"lexical": 0.5}}]
    options += [{"chunking": Chunking(tokens=40, overlap=10)}, {"name": "other"}]
    made = [build_in(folder, records(n), **one)[1] for n, one in enumerate(options, start=1)]
    return folder / "indexes", made


@pytest.fixture
def versions(built_versions: tuple[Path, list[IndexManifest]], settings: Settings) -> list[Path]:
    """Two versions of one index, the second one of chunks, and the version of another index."""
    indexes, made = built_versions
    shutil.copytree(indexes, settings.indexes)
    return [settings.indexes / each.name / each.version for each in made]


def attack(
    serve: Serve,
    tmp_path: Path,
    versions: list[Path],
    seed: int,
    *,
    until_outside: bool = False,
    **changes: Any,
) -> Report:
    attacker = Attack(seed, versions[:2], versions[2])
    (tmp_path / "keys").write_text(attacker.key_file)
    client = serve(api_keys_file=tmp_path / "keys", **changes)
    return attacker.run(client, STEPS, until_outside=until_outside)


@pytest.mark.parametrize("changes", CACHES)
def test_no_caller_sees_a_document_outside(
    serve: Serve, versions: list[Path], tmp_path: Path, changes: dict[str, Any]
) -> None:
    for seed in range(2):
        report = attack(serve, tmp_path, versions, seed, **changes)
        print(f"{len(report.outside)} documents outside in {report.requests} requests")
        assert report.outside == []
        assert report.wrong == []
        assert report.hits > report.requests


@pytest.mark.e2e
def test_no_caller_sees_a_document_outside_through_redis(
    serve: Serve, versions: list[Path], tmp_path: Path
) -> None:
    with run_redis(tmp_path) as redis:
        secrets = {"redis_url": SecretStr(redis.url), "cache_secret": SecretStr("shared")}
        for seed in range(2):
            how = {"redis_timeout_ms": 500, "cache_entries": 0} | secrets
            report = attack(serve, tmp_path, versions, seed, **how)
            assert report.outside == []
            assert report.wrong == []


def without_conditions_in_keys(patch: pytest.MonkeyPatch) -> None:
    names = [name for name in cache._QUERY_FIELDS if name != "conditions"]
    patch.setattr(cache, "_QUERY_FIELDS", names)


def without_bounds_of_queries(patch: pytest.MonkeyPatch) -> None:
    checked = query_checks.checked_query
    patch.setattr(engine, "checked_query", lambda *given: checked(*given[:3]))


def without_bounds_of_documents(patch: pytest.MonkeyPatch) -> None:
    find = DocumentReader.find
    patch.setattr(DocumentReader, "find", lambda self, id_, within: find(self, id_))


def without_bounds_of_values(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(documents, "counts_within", lambda *_: {})
    patch.setattr("service.routes.search.counts_within", lambda *_: {})


@pytest.mark.parametrize(
    "break_it",
    [
        without_conditions_in_keys,
        without_bounds_of_queries,
        without_bounds_of_documents,
        without_bounds_of_values,
    ],
)
def test_the_attack_finds_what_is_broken(
    serve: Serve,
    versions: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    break_it: Callable[[pytest.MonkeyPatch], None],
) -> None:
    break_it(monkeypatch)
    assert attack(serve, tmp_path, versions, 0, until_outside=True).outside


GRANTS = {
    "inner": [{"indexes": "test", "role": "search", "filter": {"department": "内科"}}],
    "lacking": [{"indexes": "test", "role": "search", "filter": {"none": {"not": 1}}}],
    "other": [{"indexes": "other", "role": "admin"}],
    "ops": [{"indexes": "t*", "role": "admin"}],
}


@pytest.fixture
def ask(serve: Serve, versions: list[Path], tmp_path: Path) -> Callable[..., Response]:
    """Sends a request with the key of a name; the others are `expired` and `unknown`."""
    made = {name: new_key(name, "search", grants) for name, grants in GRANTS.items()}
    made["expired"] = new_key("expired", "search", GRANTS["ops"], date(2020, 1, 1))
    (tmp_path / "keys").write_text("".join(entry for _, entry in made.values()))
    client = serve(api_keys_file=tmp_path / "keys")
    secrets = {name: secret for name, (secret, _) in made.items()} | {"unknown": "care_unknown"}

    def send(name: str, path: str, body: Any = None) -> Response:
        headers = {"Authorization": f"Bearer {secrets[name]}", "X-Request-ID": "1"}
        return client.request(
            "POST" if body is not None else "GET", path, json=body, headers=headers
        )

    return send


QUERY = {"query": "高血压"}


def test_an_expired_key_is_as_an_unknown_one(ask: Callable[..., Response]) -> None:
    expired, unknown = (ask(name, "/search", QUERY) for name in ("expired", "unknown"))
    assert expired.status_code == unknown.status_code == 401
    assert expired.content == unknown.content
    assert expired.headers == unknown.headers


def test_a_grant_for_another_index_opens_vectors_of_texts_alone(
    ask: Callable[..., Response],
) -> None:
    for path, body in [
        *(("/search", QUERY), ("/search/batch", {"queries": [QUERY]}), ("/index/reload", {})),
        *(("/index", None), ("/documents/m2x000", None)),
    ]:
        response = ask("other", path, body)
        assert (response.status_code, response.json()["code"]) == (403, "forbidden")
        assert ask("ops", path, body).status_code == 200
    assert ask("other", "/v1/embeddings", {"input": "高血压"}).status_code == 200
    assert ask("other", "/v1/models").status_code == 200
    assert ask("inner", "/index/reload", {}).status_code == 403


def test_within_a_filter_no_field_is_unknown(ask: Callable[..., Response]) -> None:
    filter_ = {"filter": {"none": 1}}
    limit = {"limit_per": {"field": "none", "hits": 1}}
    assert ask("ops", "/search", QUERY | filter_).json()["code"] == "unknown_filter_field"
    assert ask("ops", "/search", QUERY | limit).json()["code"] == "unknown_filter_field"
    assert ask("inner", "/search", QUERY | filter_).json()["hits"] == []
    assert ask("inner", "/search", QUERY | limit).json()["hits"]


def test_a_grant_with_a_field_that_no_document_has_opens_nothing_and_is_logged_once(
    ask: Callable[..., Response], caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        assert ask("lacking", "/search", QUERY).json()["hits"] == []
    assert ask("lacking", "/documents/m2x000").status_code == 404
    assert ask("lacking", "/index").json()["documents"] == 0
    fields = [
        record.__dict__["fields"]
        for record in caplog.records
        if (record.name, record.levelname) == ("care.service", "WARNING")
    ]
    assert fields == [{"index": "test", "client": "key lacking", "filter_fields": ("none",)}]
