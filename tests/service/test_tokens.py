"""Signed tokens whose claims are grants."""

import base64
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from fastapi.testclient import TestClient
from pydantic import SecretStr

from core.conditions import parse_filter
from core.errors import CareError
from core.manifest import IndexManifest
from service.access import key_file
from service.access.grants import Caller, Grant
from service.access.tokens import Tokens
from service.observe.logs import JsonFormatter
from service.settings import Algorithm
from tests.conftest import SEARCH_KEY
from tests.errors import raises
from tests.service.conftest import Serve, wait_until
from tests.service.test_key_file import replace

Json = dict[str, Any]
ALL: tuple[Algorithm, ...] = ("HS256", "EdDSA", "RS256")
SECRET = b"0123456789abcdef0123456789abcdef"
ED = Ed25519PrivateKey.generate()
RSA = generate_private_key(65537, 2048)
PRIVATE: dict[str, Any] = {"hs": SECRET, "ed": ED, "rsa": RSA}
NAMES = dict(zip(PRIVATE, ALL, strict=True))
GRANT: Json = {"indexes": "test", "role": "search", "filter": {"department": "儿科"}}


def public(private: Any, kid: str) -> Json:
    if isinstance(private, bytes):
        encoded = base64.urlsafe_b64encode(private).rstrip(b"=").decode()
        return {"kty": "oct", "k": encoded, "kid": kid}
    kind = jwt.algorithms.RSAAlgorithm if isinstance(private, RSAPrivateKey) else None
    made = (kind or jwt.algorithms.OKPAlgorithm).to_jwk(private.public_key(), as_dict=True)
    return made | {"kid": kid}


KEYS = [public(private, kid) for kid, private in PRIVATE.items()]


def key_set(*keys: Json) -> bytes:
    return json.dumps({"keys": keys or KEYS}).encode()


def token(kid: str = "hs", **claims: Any) -> str:
    """A token with changed claims; None removes one."""
    given = {"sub": "dr-li", "aud": "care", "exp": time.time() + 60, "grants": [GRANT]} | claims
    present = {name: value for name, value in given.items() if value is not None}
    return jwt.encode(present, PRIVATE[kid], NAMES[kid], {"kid": kid})


@pytest.mark.parametrize("kid", PRIVATE)
def test_a_valid_token_has_grants(kid: str) -> None:
    found = Tokens(key_set(), ALL, "care").find(token(kid))
    bounds = parse_filter({"department": "儿科"})
    assert found == Caller("token:dr-li", (Grant("test", "search", bounds),))


@pytest.mark.parametrize(
    "claims",
    [
        *({"exp": 1}, {"exp": None}, {"exp": "soon"}, {"nbf": 1 << 40}, {"iat": 1 << 40}),
        *({"sub": None}, {"sub": ""}, {"sub": 5}, {"sub": "a\nb"}, {"sub": "a" * 65}),
        *({"aud": None}, {"aud": "other"}, {"aud": []}, {"iss": None}, {"iss": "other"}),
        *({"grants": None}, {"grants": GRANT}, {"grants": [GRANT] * 65}, {"grants": ["test"]}),
        {"grants": [GRANT | {"role": "admin"}]},
        {"grants": [GRANT, GRANT | {"filter": {}}]},
    ],
)
def test_a_token_with_wrong_claims_is_none(claims: Json) -> None:
    tokens = Tokens(key_set(), ALL, "care", "portal")
    assert tokens.find(token(iss="portal"))
    assert tokens.find(token(iss="portal", aud=["other", "care"]))
    assert tokens.find(token(iss="portal", exp=time.time() - 5))  # clocks differ
    assert tokens.find(token(**{"iss": "portal"} | claims)) is None


def encoded(value: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()


def forged(header: Json, key: bytes = b"") -> str:
    """A token of a header, signed by HMAC with any bytes."""
    claims = {"sub": "x", "aud": "care", "exp": time.time() + 60, "grants": [GRANT]}
    message = f"{encoded(header)}.{encoded(claims)}"
    signature = jwt.algorithms.HMACAlgorithm(jwt.algorithms.HMACAlgorithm.SHA256).sign(
        message.encode(), key
    )
    return f"{message}.{base64.urlsafe_b64encode(signature).rstrip(b'=').decode()}"


def test_the_header_of_a_token_does_not_choose_the_algorithm() -> None:
    tokens = Tokens(key_set(), ALL, "care")
    assert tokens.find(forged({"alg": "HS256", "kid": "hs"}, SECRET))
    pem = RSA.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    der = RSA.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    raw = ED.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    for key in (pem, pem.strip(), der, raw, b""):
        for kid in PRIVATE:
            assert tokens.find(forged({"alg": "HS256", "kid": kid}, key)) is None
    for algorithm in ("none", "None", "HS512", "RS256", "EdDSA", None, 5):
        for kid in PRIVATE:
            unsigned = forged({"alg": algorithm, "kid": kid}).rpartition(".")[0] + "."
            assert tokens.find(unsigned) is None
    for kid in ("other", "", None, 5, ["hs"]):
        assert tokens.find(forged({"alg": "HS256", "kid": kid}, SECRET)) is None
    assert tokens.find(forged({"alg": "HS256"}, SECRET)) is None


def test_what_is_no_token_is_none() -> None:
    tokens = Tokens(key_set(), ALL, "care")
    valid = token("ed")
    head, body, signature = valid.split(".")
    deep = base64.urlsafe_b64encode(b"[" * 9000).decode()
    for text in (
        *("", "..", "a.b.c", "é.é.é", f"{head}.{body}.", f"{head}.{head}.{signature}", valid[:-4]),
        *(f"{deep}.{body}.{signature}", f"{head}.{deep}.{signature}", valid + ".x"),
    ):
        assert tokens.find(text) is None
    assert tokens.find(valid)


def test_a_key_of_an_algorithm_that_is_not_listed_is_an_error() -> None:
    for kid, name in NAMES.items():
        others = [algorithm for algorithm in ALL if algorithm != name]
        with raises(CareError, "invalid_token_keys", entry=1):
            Tokens(key_set(public(PRIVATE[kid], kid)), others, "care")


@pytest.mark.parametrize(
    ("content", "entry"),
    [
        *((b"", 0), (b"[]", 0), (b"{}", 0), (b'{"keys":[]}', 0), (b"[" * 100_000, 0)),
        (key_set({"kty": "oct", "k": "aaaa"}), 1),
        (key_set(KEYS[0], {"kid": "b", "kty": "EC"}), 2),
        (key_set(KEYS[0], KEYS[0]), 2),
        (key_set(KEYS[0] | {"alg": "HS512"}), 1),
        (key_set(KEYS[0] | {"k": "aaaa"}), 1),
        (key_set(KEYS[1] | {"crv": "Ed448"}), 1),
        (key_set(KEYS[1] | {"x": "aaaa"}), 1),
        (key_set(KEYS[1] | {"d": "aaaa"}), 1),
        (key_set(KEYS[2] | {"n": None}), 1),
        (key_set(public(generate_private_key(65537, 1024), "short")), 1),
    ],
)
def test_a_wrong_key_is_named_without_its_secret(content: bytes, entry: int) -> None:
    with raises(CareError, "invalid_token_keys", entry=entry) as caught:
        Tokens(content, ALL, "care")
    assert "aaaa" not in str(caught.value)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(key_file, "_READ_EVERY", 0.01)
    path = tmp_path / "keys.json"
    path.write_bytes(key_set())
    return path


@pytest.fixture
def with_tokens(serve: Serve, manifest: IndexManifest, path: Path) -> Callable[..., TestClient]:
    def start(**changes: Any) -> TestClient:
        return serve(token_algorithms=ALL, token_keys=path, **changes)

    return start


def search(client: TestClient, secret: str) -> Any:
    headers = {"Authorization": f"Bearer {secret}", "X-Request-ID": "1"}
    return client.post("/search", json={"query": "发热", "top_k": 60}, headers=headers)


def test_a_token_opens_what_its_grants_say(
    with_tokens: Callable[..., TestClient], caplog: pytest.LogCaptureFixture
) -> None:
    client = with_tokens()
    caplog.set_level("INFO")
    for kid in PRIVATE:
        hits = search(client, token(kid)).json()["hits"]
        assert {hit["metadata"]["department"] for hit in hits} == {"儿科"}
    assert "token:dr-li" in JsonFormatter().format(caplog.records[-1])
    assert search(client, token(grants=[])).status_code == 403
    headers = {"Authorization": f"Bearer {token()}"}
    assert client.post("/index/reload", headers=headers).status_code == 403
    admin = {"Authorization": f"Bearer {token(grants=[{'indexes': '*', 'role': 'admin'}])}"}
    assert client.post("/index/reload", headers=admin).status_code == 200
    assert client.post("/search", json={"query": "发热"}).status_code == 401


def test_a_token_that_is_not_valid_or_not_accepted_is_as_an_unknown_key(
    with_tokens: Callable[..., TestClient], serve: Serve
) -> None:
    client, without = with_tokens(), serve(api_keys=SecretStr(SEARCH_KEY))
    answers = [search(client, secret) for secret in (token(exp=1), "a.b.c", "care_unknown")]
    answers.append(search(without, token()))
    assert {answer.status_code for answer in answers} == {401}
    assert len({answer.content for answer in answers}) == 1


def test_keys_are_rotated_without_a_restart(
    with_tokens: Callable[..., TestClient], path: Path
) -> None:
    client = with_tokens()
    assert search(client, token("hs")).status_code == 200
    replace(path, key_set(*KEYS[1:]).decode())
    wait_until(lambda: search(client, token("hs")).status_code == 401)
    assert search(client, token("ed")).status_code == 200
    replace(path, "half of a fi")
    assert search(client, token("ed")).status_code == 200


def test_each_subject_has_a_rate(with_tokens: Callable[..., TestClient]) -> None:
    client = with_tokens(rate_limit=0.01, rate_burst=1)
    statuses = [search(client, token(sub=sub)).status_code for sub in ("a", "a", "b")]
    assert statuses == [200, 429, 200]
