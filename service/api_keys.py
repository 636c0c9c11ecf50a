"""The keys of `CARE_API_KEYS`: read, made, and found by what a client presents."""

import hashlib
import hmac
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self, cast, get_args

from core.errors import CareError

Role = Literal["search", "admin"]

_PREFIX = "care_"
_NAME = re.compile(r"(?!care_)[A-Za-z0-9][A-Za-z0-9._-]{0,31}")
_NAME_RULE = "1 to 32 of A-Z, a-z, 0-9, '.', '_' and '-', not beginning with a sign or 'care_'"
_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """Who may ask, and for what.

    Attributes:
        name: Appears in logs, messages and rate limits.
        role: What it is for.
    """

    name: str
    role: Role

    def allows(self, role: Role) -> bool:
        """Returns whether this key may do what a role does; admin may all."""
        return self.role in ("admin", role)


class ApiKeys:
    """The keys that the service knows, by their SHA-256; false if there is none.

    One round of SHA-256 is enough: a key is 256 random bits, which nobody can guess or
    tabulate, unlike a password, for which slow hashes with a salt are made.

    Args:
        entries: Keys with the SHA-256 [32 bytes] of their secrets.
    """

    def __init__(self, entries: Sequence[tuple[ApiKey, bytes]]) -> None:
        self._entries = entries

    def __bool__(self) -> bool:
        return bool(self._entries)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads the value of `CARE_API_KEYS`: comma-separated `name:role:sha256`.

        Raises:
            CareError: If an entry is malformed, or a name or hash occurs twice; the message never
                quotes a key or hash.
        """
        if not text.strip():
            return cls([])
        entries: dict[str, tuple[ApiKey, bytes]] = {}
        names_by_hash: dict[bytes, str] = {}
        for position, entry in enumerate(text.split(","), 1):
            key, digest = _parse_entry(position, entry.strip())
            if key.name in entries:
                message = f"CARE_API_KEYS names '{key.name}' twice"
                raise CareError(message, code="duplicate_key_name", name=key.name)
            if digest in names_by_hash:
                message = f"gives '{names_by_hash[digest]}' and '{key.name}' the same key"
                raise CareError(f"CARE_API_KEYS {message}", code="duplicate_key", name=key.name)
            entries[key.name] = key, digest
            names_by_hash[digest] = key.name
        return cls(list(entries.values()))

    def has(self, role: Role) -> bool:
        """Returns whether any key is of a role."""
        return any(key.role == role for key, _ in self._entries)

    def find(self, presented: str) -> ApiKey | None:
        """Returns the key that a client presents, or None.

        Every entry is compared, in constant time, so that the time taken tells nothing.
        """
        digest = _digest(presented)
        found = None
        for key, expected in self._entries:
            if hmac.compare_digest(digest, expected):
                found = key
        return found


def new_key(name: str, role: Role) -> tuple[str, str]:
    """Makes a key.

    Returns:
        The secret, for the client, and the entry of `CARE_API_KEYS`.

    Raises:
        CareError: If the name cannot be used.
    """
    if not _NAME.fullmatch(name):
        message = f"'{name}' is no name for a key: it is {_NAME_RULE}"
        raise CareError(message, code="invalid_key_name", name=name)
    secret = _PREFIX + secrets.token_urlsafe(32)
    return secret, f"{name}:{role}:{_digest(secret).hex()}"


def _parse_entry(position: int, entry: str) -> tuple[ApiKey, bytes]:
    def fault(code: str, message: str) -> CareError:
        where = f"entry {position} of CARE_API_KEYS"
        return CareError(f"{where} {message}", code=code, entry=position)

    parts = entry.split(":")
    if len(parts) != 3:
        raise fault("invalid_key_entry", "is not name:role:sha256")
    name, role, digest = parts
    if not _NAME.fullmatch(name):
        # Not quoted, as it may be a key or hash put into the wrong place.
        raise fault("invalid_key_name", f"has no name that can be used: it is {_NAME_RULE}")
    if role not in get_args(Role):
        known = " or ".join(get_args(Role))
        raise fault("invalid_key_role", f"('{name}') has no role that exists: {known}")
    if not _HASH.fullmatch(digest):
        raise fault(
            "invalid_key_hash",
            f"('{name}') has no SHA-256 of a key, 64 digits 0-9 and a-f: "
            "`python -m service key` makes one",
        )
    return ApiKey(name, cast("Role", role)), bytes.fromhex(digest)


def _digest(presented: str) -> bytes:
    return hashlib.sha256(presented.encode()).digest()
