"""API keys: parsing their entries, making a key, finding the key that a client sends."""

import hashlib
import hmac
import re
import secrets
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, date, datetime, time, timedelta
from typing import Any, Self

import tomli_w

from core.errors import CareError
from service.access.grants import ROLES, Caller, Grant, Role, read_grant

_NAME = re.compile(r"(?!care_)[A-Za-z0-9][A-Za-z0-9._-]{0,31}")
_NAME_RULE = (
    "1 to 32 letters, digits, '.', '_' or '-'; the first is a letter or digit; not 'care_…'"
)


_HASH = re.compile("[0-9a-f]{64}")
_HASH_RULE = "64 digits 0-9 and a-f: make one with `care key`"
# The setting of entries in TOML, and their fields.
_FILE = "CARE_API_KEYS_FILE"
_FIELDS = ("name", "sha256", "expires", "comment", "grant")

# A key with the SHA-256 of its secret.
_Entry = tuple[bytes, Caller]


class ApiKeys:
    """The keys of the service.

    One round of SHA-256 without a salt suffices for the configured hashes: unlike a password, a
    secret of 256 random bits cannot be guessed or looked up in a table. In memory, keys are found
    by an HMAC of this hash under a random key of the process. The time of a lookup depends neither
    on the number of keys nor on how much of a hash matches.

    Args:
        keys: The keys by the SHA-256 [32 bytes] of their secrets.
    """

    def __init__(self, keys: Mapping[bytes, Caller]) -> None:
        self._pepper = secrets.token_bytes(32)
        self._keys = {self._tag(digest): key for digest, key in keys.items()}

    @classmethod
    def parse(cls, text: str, index: str, source: str = "CARE_API_KEYS") -> Self:
        """Parses comma-separated `name:role:sha256`; such keys open one index.

        The CareError for a wrong entry names `source` and does not quote secrets or hashes.
        """
        entries = text.split(",") if text.strip() else []
        parsed = (_parse_entry(i, one.strip(), index, source) for i, one in enumerate(entries, 1))
        return cls(_distinct(parsed, source))

    @classmethod
    def parse_toml(cls, text: str) -> Self:
        """Parses tables `[[key]]` with `[[key.grant]]`.

        The CareError names the line, or the entry and its field, and does not quote secrets or
        hashes.
        """
        try:
            document = tomllib.loads(text)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            # The message of the parser may quote a line.
            line = int((re.findall(r"at line (\d+)", str(error)) or [0])[-1])
            message = f"{_FILE} is not valid TOML" + (f" at line {line}" if line else "")
            raise CareError(message, code="invalid_key_file", line=line) from None
        keys = document.get("key")
        if document.keys() != {"key"} or not isinstance(keys, list):
            message = f"{_FILE} has something else than tables [[key]]"
            raise CareError(message, code="invalid_key_file", line=0)
        return cls(_distinct((_read_entry(i, one) for i, one in enumerate(keys, 1)), _FILE))

    def __len__(self) -> int:
        return len(self._keys)

    def has(self, role: Role) -> bool:
        """Returns whether a key has a role in any index."""
        return any(key.grant(None, role) for key in self._keys.values())

    def find(self, secret: str) -> Caller | None:
        """Returns the key with a secret, unless it has expired."""
        key = self._keys.get(self._tag(_digest(secret)))
        return None if key is None or key.has_expired() else key

    def replace(self, other: "ApiKeys") -> None:
        """Takes the keys of another object; the present ones are no longer found."""
        self._pepper, self._keys = other._pepper, other._keys

    def _tag(self, digest: bytes) -> bytes:
        return hmac.digest(self._pepper, digest, "sha256")


def new_key(
    name: str,
    role: Role,
    grants: Sequence[Mapping[str, Any]] = (),
    expires: date | None = None,
) -> tuple[str, str]:
    """Makes a key: returns the secret for the client, and the entry for the service.

    The entry is `name:role:sha256` or, with grants or an expiry, a table `[[key]]` of TOML.
    """
    if not _NAME.fullmatch(name):
        message = f"'{name}' is not a valid key name: {_NAME_RULE}"
        raise CareError(message, code="invalid_key_name", name=name)
    for grant in grants:
        read_grant(grant)
    secret = f"care_{secrets.token_urlsafe(32)}"
    digest = _digest(secret).hex()
    if not grants and expires is None:
        return secret, f"{name}:{role}:{digest}"
    fields: dict[str, Any] = {"name": name, "sha256": digest}
    if expires is not None:
        fields["expires"] = expires
    return secret, tomli_w.dumps({"key": [fields | {"grant": list(grants)}]})


def _distinct(entries: Iterable[_Entry], source: str) -> dict[bytes, Caller]:
    """Returns the keys by their hashes; CareError if two have one name or hash."""
    keys: dict[bytes, Caller] = {}
    names: set[str] = set()
    for digest, key in entries:
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
    return keys


def _parse_entry(position: int, entry: str, index: str, source: str) -> _Entry:
    name, role, digest = [*entry.split(":"), "", ""][:3]
    if entry.count(":") != 2:
        code, fault = "invalid_key_entry", "is not name:role:sha256"
    elif not _NAME.fullmatch(name):
        # The name is not quoted: it may be a secret or hash in the wrong place.
        code, fault = "invalid_key_name", f"has no valid name: {_NAME_RULE}"
    elif role not in ROLES:
        code, fault = "invalid_key_role", f"('{name}') has an unknown role: use {', '.join(ROLES)}"
    elif not _HASH.fullmatch(digest):
        code, fault = "invalid_key_hash", f"('{name}') has no valid SHA-256 of {_HASH_RULE}"
    else:
        return bytes.fromhex(digest), Caller(name, (Grant(index, role),))
    raise CareError(f"entry {position} of {source} {fault}", code=code, entry=position)


def _read_entry(position: int, entry: Any) -> _Entry:
    def invalid(code: str, fault: str, **fields: Any) -> CareError:
        return CareError(
            f"entry {position} of {_FILE} {fault}", code=code, entry=position, **fields
        )

    if not isinstance(entry, dict) or not entry.keys() <= {*_FIELDS}:
        # An unknown field is not quoted: it may be a secret in the wrong place.
        raise invalid("invalid_key_entry", f"has an unknown field: use {', '.join(_FIELDS)}")
    name, digest, grants = entry.get("name"), entry.get("sha256"), entry.get("grant")
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise invalid("invalid_key_name", f"has no valid name: {_NAME_RULE}", field="name")
    place = f"('{name}')"
    if not (isinstance(digest, str) and _HASH.fullmatch(digest)):
        fault = f"{place} has no valid SHA-256 of {_HASH_RULE}"
        raise invalid("invalid_key_hash", fault, field="sha256")
    if not isinstance(entry.get("comment", ""), str):
        raise invalid("invalid_key_entry", f"{place}: comment is not a text", field="comment")
    if not isinstance(grants, list) or not grants:
        fault = f"{place} has no tables [[key.grant]], so it opens nothing"
        raise invalid("invalid_grant", fault, field="grant")
    read = []
    for number, grant in enumerate(grants, 1):
        try:
            read.append(read_grant(grant))
        except CareError as error:
            fault = f"{place}, grant {number}: {error}"
            raise invalid(error.code, fault, grant=number, **error.fields) from None
    try:
        expires = _end_of(entry["expires"]) if "expires" in entry else None
    except TypeError:
        fault = f"{place}: expires is neither a date nor a date with a time"
        raise invalid("invalid_key_expiry", fault, field="expires") from None
    return bytes.fromhex(digest), Caller(name, tuple(read), expires)


def _end_of(expires: object) -> datetime:
    """Returns when a key expires: a date is its last day; times without an offset are UTC."""
    if isinstance(expires, datetime):
        return expires if expires.tzinfo else expires.replace(tzinfo=UTC)
    if not isinstance(expires, date):
        raise TypeError
    if expires == date.max:
        return datetime.max.replace(tzinfo=UTC)
    return datetime.combine(expires + timedelta(1), time(), UTC)


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()
