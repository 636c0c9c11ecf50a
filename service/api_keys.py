"""The keys of `CARE_API_KEYS`: read, made, and found by what a client presents."""

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass
from typing import Literal, Self, cast, get_args

from core.errors import CareError

Role = Literal["search", "admin"]

_NAME = re.compile(r"(?!care_)[A-Za-z0-9][A-Za-z0-9._-]{0,31}")
_NAME_RULE = "1 to 32 of A-Z, a-z, 0-9, '.', '_' and '-', not beginning with a sign or 'care_'"


@dataclass(frozen=True, slots=True)
class ApiKey:
    """Who may ask, and for what; the name appears in logs, messages and rate limits."""

    name: str
    role: Role

    def allows(self, role: Role) -> bool:
        """Returns whether this key may do what a role does; admin may all."""
        return self.role in ("admin", role)


class ApiKeys(dict[bytes, ApiKey]):
    """The keys that the service knows, by the SHA-256 [32 bytes] of their secrets.

    One round of SHA-256 is enough: a key is 256 random bits, which nobody can guess or
    tabulate, unlike a password, for which slow hashes with a salt are made.
    """

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads the value of `CARE_API_KEYS`: comma-separated `name:role:sha256`.

        The message of an error never quotes a key or hash.
        """
        keys = cls()
        for position, entry in enumerate(text.split(",") if text.strip() else [], 1):
            digest, key = _parse_entry(position, entry.strip())
            if key.name in {other.name for other in keys.values()}:
                message = f"CARE_API_KEYS names '{key.name}' twice"
                raise CareError(message, code="duplicate_key_name", name=key.name)
            if digest in keys:
                message = f"CARE_API_KEYS gives '{keys[digest].name}' and '{key.name}' the same key"
                raise CareError(message, code="duplicate_key", name=key.name)
            keys[digest] = key
        return keys

    def has(self, role: Role) -> bool:
        """Returns whether any key is of a role."""
        return any(key.role == role for key in self.values())

    def find(self, presented: str) -> ApiKey | None:
        """Returns the key that a client presents, or None.

        Every entry is compared, in constant time, so that the time taken tells nothing.
        """
        digest = _digest(presented)
        same = [key for expected, key in self.items() if hmac.compare_digest(digest, expected)]
        return same[0] if same else None


def new_key(name: str, role: Role) -> tuple[str, str]:
    """Makes a key; returns the secret, for the client, and the entry of `CARE_API_KEYS`."""
    if not _NAME.fullmatch(name):
        message = f"'{name}' is no name for a key: it is {_NAME_RULE}"
        raise CareError(message, code="invalid_key_name", name=name)
    secret = f"care_{secrets.token_urlsafe(32)}"
    return secret, f"{name}:{role}:{_digest(secret).hex()}"


def _parse_entry(position: int, entry: str) -> tuple[bytes, ApiKey]:
    name, role, digest = [*entry.split(":"), "", ""][:3]
    if entry.count(":") != 2:
        code, fault = "invalid_key_entry", "is not name:role:sha256"
    elif not _NAME.fullmatch(name):
        # Not quoted, as it may be a key or hash put into the wrong place.
        code, fault = "invalid_key_name", f"has no name that can be used: it is {_NAME_RULE}"
    elif role not in get_args(Role):
        known = " or ".join(get_args(Role))
        code, fault = "invalid_key_role", f"('{name}') has no role that exists: {known}"
    elif not re.fullmatch("[0-9a-f]{64}", digest):
        digits = "64 digits 0-9 and a-f: `python -m service key` makes one"
        code, fault = "invalid_key_hash", f"('{name}') has no SHA-256 of a key, {digits}"
    else:
        return bytes.fromhex(digest), ApiKey(name, cast("Role", role))
    raise CareError(f"entry {position} of CARE_API_KEYS {fault}", code=code, entry=position)


def _digest(presented: str) -> bytes:
    return hashlib.sha256(presented.encode()).digest()
