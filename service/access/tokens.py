"""Signed tokens (JWT), whose claims are grants: an application makes them for its users."""

import logging
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from core.errors import CareError, ProviderError
from core.records import parse_json
from service.access.grants import Caller, read_grant
from service.settings import Algorithm

if TYPE_CHECKING:
    from jwt import PyJWK

_LOG = logging.getLogger("care.service")

# The algorithm of each type of key, so that no key is ever used with another one.
_ALGORITHMS: dict[str, Algorithm] = {"oct": "HS256", "OKP": "EdDSA", "RSA": "RS256"}
# Smallest keys: a secret [bytes], and the modulus of RSA [bits].
_SECRET_BYTES, _RSA_BITS = 32, 2048
# By how much clocks may differ [s].
_LEEWAY = 10.0
_MAX_GRANTS = 64
# No control characters: it is in logs.
_SUBJECT = re.compile(r"[^\x00-\x1f\x7f-\x9f]{1,64}")


class Tokens:
    """Verifies tokens by keys of a JSON Web Key Set (RFC 7517).

    A token is verified with the key that its `kid` names, and with the algorithm of that key alone,
    whatever its header says.

    Args:
        content: The key set: JSON, with public keys or secrets.
        algorithms: The algorithms that are accepted.
        audience: What `aud` must have.
        issuer: What `iss` must be, or "" for any.

    Raises:
        CareError: If the set is not valid, or has a key that cannot be used; the message names the
            position of the key and quotes nothing.
        ProviderError: If the library is not installed.
    """

    def __init__(
        self, content: bytes, algorithms: Sequence[Algorithm], audience: str, issuer: str = ""
    ) -> None:
        try:
            import jwt
        except ModuleNotFoundError as error:
            message = "CARE_TOKEN_KEYS needs PyJWT: pip install 'care-retrieval[jwt]'"
            raise ProviderError(message, code="missing_package", package="PyJWT") from error
        self._jwt = jwt
        self._audience = audience
        self._issuer = issuer
        self._keys = self._read(content, algorithms)

    def __len__(self) -> int:
        return len(self._keys)

    def replace(self, other: "Tokens") -> None:
        """Takes the keys of another object."""
        self._keys = other._keys

    def find(self, token: str) -> Caller | None:
        """Returns who has a token, or None if it is not valid."""
        try:
            key = self._keys[self._jwt.get_unverified_header(token)["kid"]]
            claims = self._jwt.decode(
                token,
                key,
                algorithms=[key.algorithm_name],
                audience=self._audience,
                issuer=self._issuer or None,
                leeway=_LEEWAY,
                options={"require": ["exp", "aud", "sub", *(["iss"] if self._issuer else [])]},
            )
            return _caller(claims)
        except (
            self._jwt.PyJWTError,
            CareError,
            KeyError,
            TypeError,
            ValueError,
            RecursionError,
        ) as error:
            # Its message may quote the token.
            reason = error.code if isinstance(error, CareError) else type(error).__name__
            _LOG.debug("token rejected", extra={"fields": {"reason": reason}})
            return None

    def _read(self, content: bytes, algorithms: Sequence[Algorithm]) -> "dict[str, PyJWK]":
        try:
            found = parse_json(content)["keys"]
        except (ValueError, KeyError, TypeError):
            found = None
        if not isinstance(found, list) or not found:
            message = "CARE_TOKEN_KEYS is not a JSON Web Key Set with keys"
            raise CareError(message, code="invalid_token_keys", entry=0)
        keys: dict[str, PyJWK] = {}
        for position, one in enumerate(found, 1):
            fault = _fault(one, algorithms)
            kid = "" if fault else one["kid"]
            if kid in keys:
                fault = "has the kid of another one"
            key = None
            if not fault:
                try:
                    key = self._jwt.PyJWK(one, _ALGORITHMS[one["kty"]])
                except (self._jwt.PyJWTError, ValueError, TypeError, KeyError):
                    fault = "cannot be read"
            if key is None or (fault := fault or _weakness(key.key)):
                message = f"key {position} of CARE_TOKEN_KEYS {fault}"
                raise CareError(message, code="invalid_token_keys", entry=position)
            keys[kid] = key
        return keys


def _fault(key: Any, algorithms: Sequence[Algorithm]) -> str:
    """Returns what is wrong with the fields of a key, or ""."""
    if not isinstance(key, dict) or not isinstance(key.get("kid"), str) or not key["kid"]:
        return "has no kid"
    kty = key.get("kty")
    algorithm = _ALGORITHMS.get(kty) if isinstance(kty, str) else None
    if algorithm is None or key.get("alg", algorithm) != algorithm:
        return f"is for none of {', '.join(_ALGORITHMS.values())}"
    if algorithm not in algorithms:
        return f"is for {algorithm}, which CARE_TOKEN_ALGORITHMS does not list"
    if algorithm == "EdDSA" and key.get("crv") != "Ed25519":
        return "is not of the curve Ed25519"
    if algorithm != "HS256" and "d" in key:
        return "is private: the service needs the public key only"
    return ""


def _weakness(key: Any) -> str:
    if isinstance(key, bytes):
        return "" if len(key) >= _SECRET_BYTES else f"has less than {_SECRET_BYTES} bytes"
    bits = getattr(key, "key_size", _RSA_BITS)
    return "" if bits >= _RSA_BITS else f"has less than {_RSA_BITS} bits"


def _caller(claims: dict[str, Any]) -> Caller:
    subject, grants = claims["sub"], claims["grants"]
    if not _SUBJECT.fullmatch(subject) or not isinstance(grants, list):
        raise ValueError
    if len(grants) > _MAX_GRANTS:
        raise ValueError
    # No name of an API key has a colon.
    return Caller(f"token:{subject}", tuple(map(read_grant, grants)))
