"""Grants of keys, and the entries of TOML that have them."""

from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest

from core.conditions import parse_filter
from core.errors import CareError
from service.access.api_keys import ApiKeys, new_key
from service.access.grants import Caller, Grant, Role, read_grant
from tests.errors import raises

A, B = "a" * 64, "b" * 64
INNER = {"department": ["内科"]}


@pytest.mark.parametrize(
    ("pattern", "opened", "closed"),
    [
        ("ward", ["ward"], ["ward-1", "Ward", "war"]),
        ("ward-*", ["ward-1", "ward-"], ["ward", "a-ward-1"]),
        ("*", ["ward", "a.b_c"], []),
        ("a*b", ["ab", "axb"], ["abc", "xab"]),
        ("a.b", ["a.b"], ["axb"]),
    ],
)
def test_a_pattern_names_indexes(pattern: str, opened: list[str], closed: list[str]) -> None:
    grant = Grant(pattern, "search")
    assert all(grant.opens(name, "search") for name in opened)
    assert not any(grant.opens(name, "search") for name in closed)


def test_each_role_includes_those_before_it() -> None:
    roles: tuple[Role, ...] = ("search", "write", "admin")
    for at, role in enumerate(roles):
        opened = [each for each in roles if Grant("*", role).opens("ward", each)]
        assert opened == list(roles[: at + 1])


def test_the_first_grant_that_suffices_counts() -> None:
    bounded = Grant("ward-*", "search", parse_filter(INNER))
    rest = Grant("*", "admin")
    caller = Caller("app", (bounded, rest))
    assert caller.grant("ward-1", "search") == bounded
    assert caller.grant("ward-1", "admin") == rest
    assert caller.grant("lab", "search") == rest
    assert Caller("app", (rest, bounded)).grant("ward-1", "search") == rest
    assert Caller("app", (bounded,)).grant("lab", "search") is None
    assert Caller("app", (bounded,)).grant("ward-1", "write") is None
    assert Caller("app", (bounded,)).grant(None, "search") == bounded


FAULTS: list[tuple[Any, str]] = [
    ("ward", "grant"),
    ({"indexes": "ward"}, "grant"),
    ({"role": "search"}, "grant"),
    ({"indexes": "ward", "role": "search", "index": "lab"}, "grant"),
    ({"indexes": "", "role": "search"}, "indexes"),
    ({"indexes": ["ward"], "role": "search"}, "indexes"),
    ({"indexes": "../ward", "role": "search"}, "indexes"),
    ({"indexes": "ward-[12]", "role": "search"}, "indexes"),
    ({"indexes": "ward?", "role": "search"}, "indexes"),
    ({"indexes": "ward\n", "role": "search"}, "indexes"),
    ({"indexes": "ward", "role": "root"}, "role"),
    ({"indexes": "ward", "role": ["search"]}, "role"),
    ({"indexes": "ward", "role": "search", "filter": {}}, "filter"),
    ({"indexes": "ward", "role": "search", "filter": []}, "filter"),
    ({"indexes": "ward", "role": "search", "filter": None}, "filter"),
    ({"indexes": "ward", "role": "search", "filter": {"a": {}}}, "filter.a"),
    ({"indexes": "ward", "role": "search", "filter": {"a": []}}, "filter.a"),
    ({"indexes": "ward", "role": "search", "filter": {"a": date(2026, 1, 1)}}, "filter.a"),
    ({"indexes": "ward", "role": "admin", "filter": INNER}, "role"),
]


@pytest.mark.parametrize(("value", "field"), FAULTS)
def test_a_wrong_grant_is_an_error_of_its_field(value: Any, field: str) -> None:
    with raises(CareError, "invalid_grant", field=field):
        read_grant(value)


ENTRIES = f"""
# of the wards
[[key]]
name = "app"
sha256 = "{A}"
expires = 2999-12-31
comment = "the assistant, until it is replaced"

[[key.grant]]
indexes = "ward-*"
role = "search"
filter = {{ department = ["内科"], year = {{ gte = 2020 }} }}

[[key.grant]]
indexes = "lab"
role = "write"

[[key]]
name = "ops"
sha256 = "{B}"
grant = [{{ indexes = "*", role = "admin" }}]
"""


def test_entries_of_toml_have_grants(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ApiKeys.parse_toml(ENTRIES)
    assert len(keys) == 2
    monkeypatch.setattr("service.access.api_keys._digest", lambda secret: bytes.fromhex(secret))
    app, ops = keys.find(A), keys.find(B)
    assert ops == Caller("ops", (Grant("*", "admin"),))
    assert app is not None
    filter_ = parse_filter({"department": "内科", "year": {"gte": 2020}})
    assert app.grants == (Grant("ward-*", "search", filter_), Grant("lab", "write"))
    assert app.expires == datetime(3000, 1, 1, tzinfo=UTC)


def entry(**fields: Any) -> str:
    """An entry with changed fields, each as TOML."""
    given = {"name": '"app"', "sha256": f'"{A}"', "grant": '[{ indexes = "*", role = "search" }]'}
    return "[[key]]\n" + "".join(f"{k} = {v}\n" for k, v in (given | fields).items() if v)


WRONG: list[tuple[str, str, dict[str, Any]]] = [
    ("[[key]]\nname = care_aaaa\n", "invalid_key_file", {"line": 2}),
    ("[[key]]\ncare_aaaa = 1\ncare_aaaa = 2\n", "invalid_key_file", {"line": 3}),
    ("[key]\nname = 'a'\n", "invalid_key_file", {}),
    ("[[keys]]\nname = 'a'\n", "invalid_key_file", {}),
    ("[[key]]\n[other]\n", "invalid_key_file", {}),
    ("[" * 100_000, "invalid_key_file", {}),
    (entry(care_aaaa="1"), "invalid_key_entry", {"entry": 1}),
    (entry(comment="1"), "invalid_key_entry", {"entry": 1, "field": "comment"}),
    (entry(name=""), "invalid_key_name", {"entry": 1, "field": "name"}),
    (entry(name='"care_aaaa"'), "invalid_key_name", {"entry": 1, "field": "name"}),
    (entry(sha256='"care_aaaa"'), "invalid_key_hash", {"entry": 1, "field": "sha256"}),
    (entry(grant=""), "invalid_grant", {"entry": 1, "field": "grant"}),
    (entry(grant="[]"), "invalid_grant", {"entry": 1, "field": "grant"}),
    (
        entry(grant='[{ indexes = "*", role = "search" }, { indexes = "*", role = "care_aaaa" }]'),
        "invalid_grant",
        {"entry": 1, "grant": 2, "field": "role"},
    ),
    (entry(expires='"2026-05-31"'), "invalid_key_expiry", {"entry": 1, "field": "expires"}),
    (entry(expires="12:00:00"), "invalid_key_expiry", {"entry": 1, "field": "expires"}),
    (entry() + entry(name='"b"', sha256=f'"{A[1:]}"'), "invalid_key_hash", {"entry": 2}),
    (entry() + entry(sha256=f'"{B}"'), "duplicate_key_name", {"name": "app"}),
    (entry() + entry(name='"b"'), "duplicate_key", {"name": "b"}),
]


@pytest.mark.parametrize(("text", "code", "fields"), WRONG)
def test_a_wrong_entry_is_named_without_its_secret(
    text: str, code: str, fields: dict[str, Any]
) -> None:
    with raises(CareError, code, **fields) as caught:
        ApiKeys.parse_toml(text)
    assert "aaaa" not in str(caught.value)
    assert "aaaa" not in str(caught.value.fields)
    assert "\n" not in str(caught.value)


def test_a_key_expires_at_the_end_of_its_last_day(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return moment

    monkeypatch.setattr("service.access.grants.datetime", Clock)
    grants = [{"indexes": "*", "role": "search"}]
    for expires, end in [
        ("2026-05-31", datetime(2026, 6, 1, tzinfo=UTC)),
        ("2026-05-31T12:00:00", datetime(2026, 5, 31, 12, tzinfo=UTC)),
        ("2026-05-31T12:00:00+08:00", datetime(2026, 5, 31, 4, tzinfo=UTC)),
        ("9999-12-31", datetime(9999, 12, 31, tzinfo=UTC)),
    ]:
        secret, made = new_key("app", "search", grants, date(2000, 1, 1))
        keys = ApiKeys.parse_toml(made.replace("2000-01-01", expires))
        moment = end - timedelta(seconds=1)
        assert keys.find(secret)
        moment = end
        assert bool(keys.find(secret)) == expires.startswith("9999")


def test_a_new_key_with_grants_is_an_entry_of_toml() -> None:
    grants = [{"indexes": "ward-*", "role": "search", "filter": INNER}]
    secret, made = new_key("app", "search", grants, date(2999, 1, 1))
    other, more = new_key("ops", "admin", [{"indexes": "*", "role": "admin"}])
    keys = ApiKeys.parse_toml(made + more)
    app = keys.find(secret)
    assert app is not None
    assert app.grants == (Grant("ward-*", "search", parse_filter(INNER)),)
    assert keys.find(other) == Caller("ops", (Grant("*", "admin"),))
    with raises(CareError, "invalid_grant", field="role"):
        new_key("app", "admin", [grants[0] | {"role": "admin"}])
