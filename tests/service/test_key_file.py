"""API keys that are replaced while the service runs."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from pydantic import SecretStr

from core.errors import CareError
from service.access import key_file
from service.access.api_keys import new_key
from service.access.grants import Caller, Grant
from service.access.key_file import KeyFile
from service.observe.logs import JsonFormatter
from service.settings import Settings, warn_of_settings
from tests.conftest import ADMIN_KEY, SEARCH_KEY
from tests.errors import raises
from tests.service.conftest import Serve, sample, wait_until

RELOADS = "care_api_key_reloads_total"


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_file, "_READ_EVERY", 0.01)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(SEARCH_KEY)
    return path


def status(client: TestClient, secret: str) -> int:
    return client.get("/index", headers={"Authorization": f"Bearer {secret}"}).status_code


FIFO = object()


def replace(path: Path, content: Any) -> None:
    """Replaces a file by a text, bytes or a FIFO; None removes it."""
    new = path.with_name("new")
    if content is None:
        path.unlink()
        return
    if content is FIFO:
        os.mkfifo(new)
    else:
        new.write_bytes(content if isinstance(content, bytes) else content.encode())
    new.replace(path)


@pytest.mark.parametrize(
    "text",
    [
        f"{SEARCH_KEY}\n{ADMIN_KEY}\n",
        f"\ufeff{SEARCH_KEY}\r\n{ADMIN_KEY}\r\n",
        f"{SEARCH_KEY},{ADMIN_KEY}",
        f"# of the portal\r\n\r\n  {SEARCH_KEY} ,  # until May\r\n{ADMIN_KEY},\r\n",
    ],
)
def test_entries_are_on_lines_or_between_commas_and_comments_are_skipped(
    path: Path, text: str
) -> None:
    path.write_bytes(text.encode())
    keys = KeyFile(path, "test").keys
    assert len(keys) == 2
    assert keys.find("asks") == Caller("app", (Grant("test", "search"),))
    assert keys.find("secret") == Caller("ops", (Grant("test", "admin"),))


_OPS, _APP = ADMIN_KEY.split(":"), SEARCH_KEY.split(":")
TOML = f"""
# of the portal
[[key]]
name = "ops"
sha256 = "{_OPS[2]}"
grant = [{{ indexes = "test", role = "admin" }}]

[[key]]
name = "app"
sha256 = "{_APP[2]}"
expires = 2999-01-01
[[key.grant]]
indexes = "*"
role = "search"
"""


def test_a_file_with_tables_is_toml(serve: Serve, path: Path) -> None:
    client = serve(api_keys_file=path)
    replace(path, TOML)
    wait_until(lambda: status(client, "secret") == 200)
    assert status(client, "asks") == 200
    assert sample(client, RELOADS, result="success") == 1


FAULTS: list[tuple[Any, str, dict[str, Any]]] = [
    (None, "key_file_unreadable", {}),
    (FIFO, "key_file_unreadable", {}),
    (b"", "no_api_keys", {}),
    (b"# none\n,\n", "no_api_keys", {}),
    (f"{SEARCH_KEY}\ncare_aaaa", "invalid_key_entry", {"entry": 2}),
    (f"{SEARCH_KEY}\n{SEARCH_KEY}", "duplicate_key_name", {"name": "app"}),
    (b"\xff\xfe\x00", "invalid_key_entry", {"entry": 1}),
    (b"#" * (1 << 20) + b"#", "key_file_too_large", {"limit": 1 << 20}),
    (b"[[key]]\nname = care_aaaa\n", "invalid_key_file", {"line": 2}),
    (TOML.replace("search", "care_aaaa"), "invalid_grant", {"entry": 2, "grant": 1}),
]


@pytest.mark.parametrize(("content", "code", "fields"), FAULTS)
def test_a_wrong_file_is_an_error_at_the_start(
    path: Path, content: Any, code: str, fields: dict[str, Any]
) -> None:
    replace(path, content)
    with raises(CareError, code, **fields) as caught:
        KeyFile(path, "test")
    assert "aaaa" not in str(caught.value)


def test_a_new_key_is_accepted_and_the_old_one_rejected(serve: Serve, path: Path) -> None:
    client = serve(api_keys_file=path)
    assert (status(client, "asks"), status(client, "wrong")) == (200, 401)
    secret, entry = new_key("app", "search")
    replace(path, entry)
    wait_until(lambda: status(client, secret) == 200)
    assert status(client, "asks") == 401
    assert sample(client, RELOADS, result="success") == 1


def test_a_file_behind_a_changed_link_is_read(serve: Serve, tmp_path: Path) -> None:
    """Kubernetes replaces the link ..data; size and time of the file may be the same."""
    (old, old_entry), (new, new_entry) = (new_key("app", "search") for _ in range(2))
    for folder, entry in (("..1", old_entry), ("..2", new_entry)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "keys").write_text(entry)
        os.utime(tmp_path / folder / "keys", (0, 0))
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "keys").symlink_to("..data/keys")
    client = serve(api_keys_file=tmp_path / "keys")
    assert status(client, old) == 200
    (tmp_path / "..data_tmp").symlink_to("..2")
    (tmp_path / "..data_tmp").replace(tmp_path / "..data")
    wait_until(lambda: status(client, new) == 200)
    assert status(client, old) == 401


@pytest.mark.parametrize(("content", "code", "fields"), FAULTS[::3])
def test_a_wrong_file_keeps_the_keys_and_is_logged_once(
    serve: Serve,
    path: Path,
    caplog: pytest.LogCaptureFixture,
    content: Any,
    code: str,
    fields: dict[str, Any],
) -> None:
    client = serve(api_keys_file=path)
    read = KeyFile._read
    reads = 0

    def count(file: KeyFile) -> bytes:
        nonlocal reads
        reads += 1
        return read(file)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KeyFile, "_read", count)
        replace(path, content)
        wait_until(lambda: sample(client, RELOADS, result="failure") == 1)
        seen = reads
        wait_until(lambda: reads > seen + 3)
    lines = [
        json.loads(JsonFormatter().format(r))
        for r in caplog.records
        if (r.name, r.levelname) == ("care.service", "ERROR")
    ]
    assert [line["code"] for line in lines] == [code]
    assert fields.items() <= lines[0].items()
    assert "aaaa" not in json.dumps(lines)
    assert status(client, "asks") == 200
    assert sample(client, RELOADS, result="failure") == 1
    secret, entry = new_key("app", "search")
    replace(path, entry)
    wait_until(lambda: status(client, secret) == 200)


def test_the_rate_limit_of_a_name_survives_the_replacement_of_its_key(
    serve: Serve, path: Path
) -> None:
    client = serve(api_keys_file=path, rate_limit=0.01, rate_burst=1)

    def ask(secret: str) -> int:
        headers = {"Authorization": f"Bearer {secret}"}
        return client.post("/search", json={"query": "高血压"}, headers=headers).status_code

    assert ask("asks") == 200
    secret, entry = new_key("app", "search")
    replace(path, entry)
    wait_until(lambda: status(client, secret) == 200)
    assert ask(secret) == 429


def test_without_keys_an_address_of_the_network_is_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    warn_of_settings(Settings(host="127.0.0.1"))
    warn_of_settings(Settings(host="localhost"))
    warn_of_settings(Settings(host="0.0.0.0", api_keys=SecretStr(SEARCH_KEY)))
    warn_of_settings(Settings(host="0.0.0.0", api_keys_file=Path("keys")))
    assert caplog.records == []
    warn_of_settings(Settings(host="0.0.0.0"))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
