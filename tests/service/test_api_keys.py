import hashlib
import hmac

import pytest

from service.api_keys import ApiKey, ApiKeyError, ApiKeys, new_key

A, B = "a" * 64, "b" * 64


def test_no_text_is_no_keys() -> None:
    for text in ("", "  \n"):
        keys = ApiKeys.parse(text)
        assert not keys.has("search")
        assert keys.find("") is None


def test_each_secret_finds_its_own_key_and_another_none() -> None:
    app, app_entry = new_key("app", "search")
    ops, ops_entry = new_key("ops-2.eu", "admin")
    keys = ApiKeys.parse(f" {app_entry} ,\n{ops_entry} ")
    assert keys.find(app) == ApiKey("app", "search")
    assert keys.find(ops) == ApiKey("ops-2.eu", "admin")
    for wrong in ("", app[:-1], app + " ", app.upper(), app_entry, app_entry[-64:], "é", "密钥"):
        assert keys.find(wrong) is None


def test_the_hash_is_plain_sha256_as_sha256sum_prints_it() -> None:
    keys = ApiKeys.parse("app:search:" + hashlib.sha256(b"care_x").hexdigest())
    assert keys.find("care_x") == ApiKey("app", "search")


def test_admin_implies_search() -> None:
    assert ApiKey("ops", "admin").allows("admin")
    assert ApiKey("ops", "admin").allows("search")
    assert ApiKey("app", "search").allows("search")
    assert not ApiKey("app", "search").allows("admin")


def test_the_keys_have_the_roles_that_one_of_them_is_of() -> None:
    assert ApiKeys.parse(f"app:search:{A}").has("search")
    assert not ApiKeys.parse(f"app:search:{A}").has("admin")
    assert not ApiKeys.parse(f"ops:admin:{A}").has("search")
    both = ApiKeys.parse(f"app:search:{A},ops:admin:{B}")
    assert both.has("search")
    assert both.has("admin")


@pytest.mark.parametrize("owner", [0, 1, 2, None])
def test_every_entry_is_compared_whichever_matches(
    monkeypatch: pytest.MonkeyPatch, owner: int | None
) -> None:
    made = [new_key(f"k{i}", "search") for i in range(3)]
    keys = ApiKeys.parse(",".join(entry for _, entry in made))
    compared = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append(other)
        return one == other

    monkeypatch.setattr(hmac, "compare_digest", compare)
    keys.find("care_unknown" if owner is None else made[owner][0])
    assert [digest.hex() for digest in compared] == [entry[-64:] for _, entry in made]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f"app:search:{A},", "entry 2 of CARE_API_KEYS is not name:role:sha256"),
        (f"app:search:{A},,ops:admin:{B}", "entry 2 "),
        (A, "entry 1 of CARE_API_KEYS is not name:role:sha256"),
        (f"app:search:x:{A}", "entry 1 of CARE_API_KEYS is not name:role:sha256"),
        (f":search:{A}", "entry 1 of CARE_API_KEYS has no name"),
        (f"an app:search:{A}", "entry 1 of CARE_API_KEYS has no name"),
        (f"应用:search:{A}", "entry 1 of CARE_API_KEYS has no name"),
        (f"{A}:search:app", "entry 1 of CARE_API_KEYS has no name"),
        (f"care_aaaa:search:{A}", "entry 1 of CARE_API_KEYS has no name"),
        (f"app:search:{A},ops:root:{B}", "entry 2 of CARE_API_KEYS, 'ops', has no role"),
        (f"app:{A}:search", "entry 1 of CARE_API_KEYS, 'app', has no role"),
        ("app:search:care_aaaa", "entry 1 of CARE_API_KEYS, 'app', has no SHA-256"),
        (f"app:search:{A[1:]}", "entry 1 of CARE_API_KEYS, 'app', has no SHA-256"),
        (f"app:search:{A},app:admin:{B}", "CARE_API_KEYS names 'app' twice"),
        (f"app:search:{A},ops:admin:{A}", "gives 'app' and 'ops' the same key"),
    ],
)
def test_an_error_names_the_entry_and_quotes_no_secret(text: str, says: str) -> None:
    with pytest.raises(ApiKeyError) as caught:
        ApiKeys.parse(text)
    message = str(caught.value)
    assert says in message
    assert "aaaa" not in message
    assert "bbbb" not in message
    assert "\n" not in message


def test_a_new_key_is_random_and_its_entry_does_not_hold_it() -> None:
    secret, entry = new_key("app", "search")
    other, _ = new_key("app", "search")
    assert secret != other
    assert secret.startswith("care_")
    assert len(secret) == len("care_") + 43
    assert entry.startswith("app:search:")
    assert secret not in entry


@pytest.mark.parametrize("name", ["", "a b", "a:b", "a,b", "-a", "密钥", "a\n", "a" * 33, "care_a"])
def test_a_name_that_could_not_be_read_back_gets_no_key(name: str) -> None:
    with pytest.raises(ApiKeyError, match="is no name for a key"):
        new_key(name, "search")
