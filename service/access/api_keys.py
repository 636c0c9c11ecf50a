"""API keys: parsing `CARE_API_KEYS`, making a key, finding the key that a client sends."""

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Self, cast, get_args

from core.errors import CareError

Role = Literal["search", "admin"]

_NAME = re.compile(r"(?!care_)[A-Za-z0-9][A-Za-z0-9._-]{0,31}")
_NAME_RULE = (
    "1 to 32 letters, digits, '.', '_' or '-'; the first is a letter or digit; not 'care_…'"
)


@dataclass(frozen=True, slots=True)
class ApiKey:
    """Name and role of a key; the name appears in logs, messages and rate limits."""

    name: str
    role: Role

    def allows(self, role: Role) -> bool:
        """Returns whether the key may use the routes of a role; admin may use all."""
        return self.role in ("admin", role)


class ApiKeys:
    """The keys of the service.

    One round of SHA-256 without a salt suffices for the configured hashes: unlike a password, a
    secret of 256 random bits cannot be guessed or looked up in a table. In memory, keys are found
    by an HMAC of this hash under a random key of the process. The time of a lookup depends neither
    on the number of keys nor on how much of a hash matches.

    Args:
        keys: The keys by the SHA-256 [32 bytes] of their secrets.
    """

    def __init__(self, keys: Mapping[bytes, ApiKey]) -> None:
        self._pepper = secrets.token_bytes(32)
        self._keys = {self._tag(digest): key for digest, key in keys.items()}

    @classmethod
    def parse(cls, text: str, source: str = "CARE_API_KEYS") -> Self:
        """Parses comma-separated `name:role:sha256`.

        The CareError for a wrong entry names `source` and does not quote secrets or hashes.
        """
        keys: dict[bytes, ApiKey] = {}
        names: set[str] = set()
        for position, entry in enumerate(text.split(",") if text.strip() else [], 1):
            digest, key = _parse_entry(position, entry.strip(), source)
            if key.name in names:
                message = f"{source} contains two keys named '{key.name}'"
                raise CareError(message, code="duplicate_key_name", name=key.name)
            if digest in keys:
                message = (
                    f"'{keys[digest].name}' and '{key.name}' in {source} have the same hash: "
                    "make a key for each with `care key`"
                )
                raise CareError(message, code="duplicate_key", name=key.name)
            names.add(key.name)
            keys[digest] = key
        return cls(keys)

    def __len__(self) -> int:
        return len(self._keys)

    def has(self, role: Role) -> bool:
        return any(key.role == role for key in self._keys.values())

    def find(self, secret: str) -> ApiKey | None:
        return self._keys.get(self._tag(_digest(secret)))

    def replace(self, other: "ApiKeys") -> None:
        """Takes the keys of another object; the present ones are no longer found."""
        self._pepper, self._keys = other._pepper, other._keys

    def _tag(self, digest: bytes) -> bytes:
        return hmac.digest(self._pepper, digest, "sha256")


def new_key(name: str, role: Role) -> tuple[str, str]:
    """Makes a key: returns the secret for the client, and the entry for `CARE_API_KEYS`."""
    if not _NAME.fullmatch(name):
        message = f"'{name}' is not a valid key name: {_NAME_RULE}"
        raise CareError(message, code="invalid_key_name", name=name)
    secret = f"care_{secrets.token_urlsafe(32)}"
    return secret, f"{name}:{role}:{_digest(secret).hex()}"


def _parse_entry(position: int, entry: str, source: str) -> tuple[bytes, ApiKey]:
    name, role, digest = [*entry.split(":"), "", ""][:3]
    if entry.count(":") != 2:
        code, fault = "invalid_key_entry", "is not name:role:sha256"
    elif not _NAME.fullmatch(name):
        # The name is not quoted: it may be a secret or hash in the wrong place.
        code, fault = "invalid_key_name", f"has no valid name: {_NAME_RULE}"
    elif role not in get_args(Role):
        known = " or ".join(get_args(Role))
        code, fault = "invalid_key_role", f"('{name}') has an unknown role: use {known}"
    elif not re.fullmatch("[0-9a-f]{64}", digest):
        rule = "64 digits 0-9 and a-f: make one with `care key`"
        code, fault = "invalid_key_hash", f"('{name}') has no valid SHA-256 of {rule}"
    else:
        return bytes.fromhex(digest), ApiKey(name, cast("Role", role))
    raise CareError(f"entry {position} of {source} {fault}", code=code, entry=position)


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()
