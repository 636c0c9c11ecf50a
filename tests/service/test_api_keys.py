import hmac
from typing import Any

import pytest

from core.errors import CareError
from service.access.api_keys import ApiKeys, new_key
from service.access.grants import Caller, Grant, Role
from tests.errors import raises

A, B = "a" * 64, "b" * 64


def opens(name: str, role: Role, index: str = "test") -> Caller:
    """The key of an entry of one line."""
    return Caller(name, (Grant(index, role),))


def test_empty_text_parses_to_no_keys() -> None:
    for text in ("", "  \n"):
        keys = ApiKeys.parse(text, "test")
        assert not keys
        assert not keys.has("search")
        assert keys.find("") is None


def test_each_secret_finds_its_key_and_an_unknown_one_none() -> None:
    app, app_entry = new_key("app", "search")
    ops, ops_entry = new_key("ops-2.eu", "admin")
    keys = ApiKeys.parse(f" {app_entry} ,\n{ops_entry} ", "test")
    assert keys.find(app) == opens("app", "search")
    assert keys.find(ops) == opens("ops-2.eu", "admin")
    for wrong in ("", app[:-1], app + " ", app.upper(), app_entry, app_entry[-64:], "é", "密钥"):
        assert keys.find(wrong) is None


def test_has_tells_whether_any_key_has_a_role() -> None:
    assert ApiKeys.parse(f"app:search:{A}", "test").has("search")
    assert not ApiKeys.parse(f"app:search:{A}", "test").has("admin")
    assert ApiKeys.parse(f"ops:admin:{A}", "test").has("search")
    both = ApiKeys.parse(f"app:search:{A},ops:admin:{B}", "test")
    assert both.has("search")
    assert both.has("admin")
    assert ApiKeys.parse(f"ops:write:{A}", "test").has("search")


@pytest.mark.parametrize("count", [1, 100])
def test_a_lookup_hashes_as_often_for_any_number_of_keys_and_any_secret(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    made = [new_key(f"k{i}", "search") for i in range(count)]
    keys = ApiKeys.parse(",".join(entry for _, entry in made), "test")
    hashed = []

    def digest(key: bytes, message: bytes, name: str) -> bytes:
        hashed.append(message)
        return original(key, message, name)

    original = hmac.digest
    monkeypatch.setattr(hmac, "digest", digest)
    for secret in ("care_unknown", made[0][0], made[-1][0]):
        keys.find(secret)
    assert len(hashed) == 3


@pytest.mark.parametrize(
    ("text", "code", "fields"),
    [
        (f"app:search:{A},", "invalid_key_entry", {"entry": 2}),
        (f"app:search:{A},,ops:admin:{B}", "invalid_key_entry", {"entry": 2}),
        (A, "invalid_key_entry", {"entry": 1}),
        (f"app:search:x:{A}", "invalid_key_entry", {"entry": 1}),
        (f":search:{A}", "invalid_key_name", {"entry": 1}),
        (f"an app:search:{A}", "invalid_key_name", {"entry": 1}),
        (f"应用:search:{A}", "invalid_key_name", {"entry": 1}),
        (f"{A}:search:app", "invalid_key_name", {"entry": 1}),
        (f"care_aaaa:search:{A}", "invalid_key_name", {"entry": 1}),
        (f"app:search:{A},ops:root:{B}", "invalid_key_role", {"entry": 2}),
        (f"app:{A}:search", "invalid_key_role", {"entry": 1}),
        ("app:search:care_aaaa", "invalid_key_hash", {"entry": 1}),
        (f"app:search:{A[1:]}", "invalid_key_hash", {"entry": 1}),
        (f"app:search:{A},app:admin:{B}", "duplicate_key_name", {"name": "app"}),
        (f"app:search:{A},ops:admin:{A}", "duplicate_key", {"name": "ops"}),
    ],
)
def test_an_error_names_the_entry_without_its_secret(
    text: str, code: str, fields: dict[str, Any]
) -> None:
    with raises(CareError, code, **fields) as caught:
        ApiKeys.parse(text, "test")
    message = str(caught.value)
    assert all(str(value) in message for value in fields.values())
    assert "aaaa" not in message
    assert "bbbb" not in message
    assert "\n" not in message


def test_a_new_key_is_random_and_not_part_of_its_entry() -> None:
    secret, entry = new_key("app", "search")
    other, _ = new_key("app", "search")
    assert secret != other
    assert secret.startswith("care_")
    assert len(secret) == len("care_") + 43
    assert entry.startswith("app:search:")
    assert secret not in entry


@pytest.mark.parametrize("name", ["", "a b", "a:b", "a,b", "-a", "密钥", "a\n", "a" * 33, "care_a"])
def test_a_key_with_an_invalid_name_is_not_made(name: str) -> None:
    with raises(CareError, "invalid_key_name", name=name):
        new_key(name, "search")
