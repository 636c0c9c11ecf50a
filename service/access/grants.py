"""Grants: which indexes a caller may use, in which role, and which of their documents."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import Any, Literal, cast, get_args

from core.conditions import parse_filter
from core.errors import CareError, QueryError
from core.types import NO_CONDITIONS, Conjunction

# In ascending order: each includes those before it.
Role = Literal["search", "write", "admin"]
ROLES: tuple[Role, ...] = get_args(Role)

# A name of an index, in which * stands for any characters.
_PATTERN = re.compile(r"[A-Za-z0-9*][A-Za-z0-9._*-]{0,63}")
_FIELDS = ("indexes", "role", "filter")


@dataclass(frozen=True, slots=True)
class Grant:
    """A role in the indexes that a pattern names.

    A filter bounds the documents: others do not exist for the caller, and whoever may write can
    neither change one nor make one. Such a grant administers no index.
    """

    indexes: str
    role: Role
    filter: Conjunction = NO_CONDITIONS

    def opens(self, index: str | None, role: Role) -> bool:
        """Returns whether the grant includes a role in an index or, if it is None, in any."""
        includes = ROLES.index(self.role) >= ROLES.index(role)
        return includes and (index is None or fnmatchcase(index, self.indexes))


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends a request; the name appears in logs, messages and rate limits."""

    name: str
    grants: tuple[Grant, ...]
    expires: datetime | None = None

    def grant(self, index: str | None, role: Role) -> Grant | None:
        """Returns the first grant, in the order written, that opens an index in a role."""
        return next((grant for grant in self.grants if grant.opens(index, role)), None)

    def has_expired(self) -> bool:
        return self.expires is not None and datetime.now(UTC) >= self.expires


# What anyone may do in a service without keys.
EVERYTHING = Grant("*", "admin")


def read_grant(value: Any) -> Grant:
    """Returns the grant of a table of a key file, or of an object in a token.

    CareError if it is not valid; its `field` is that of the grant. The message quotes no value.
    """
    if not isinstance(value, Mapping) or not {"indexes", "role"} <= value.keys():
        raise _invalid("grant", "is not a table with indexes and role")
    if not value.keys() <= {*_FIELDS}:
        raise _invalid("grant", f"has an unknown field: use {', '.join(_FIELDS)}")
    indexes, role = value["indexes"], value["role"]
    if not (isinstance(indexes, str) and _PATTERN.fullmatch(indexes)):
        raise _invalid("indexes", "is not the name of an index, in which * may stand for any part")
    if role not in ROLES:
        raise _invalid("role", f"is unknown: use {', '.join(ROLES)}")
    if "filter" not in value:
        return Grant(indexes, cast("Role", role))
    try:
        filter_ = parse_filter(value["filter"])
    except QueryError as error:
        raise _invalid(error.field, str(error)) from None
    if not filter_:
        raise _invalid("filter", "is empty: leave it out for all documents")
    if role == "admin":
        raise _invalid("role", "is admin: a grant with a filter only searches or writes")
    return Grant(indexes, role, filter_)


def _invalid(field: str, fault: str) -> CareError:
    return CareError(f"{field} {fault}", code="invalid_grant", field=field)
