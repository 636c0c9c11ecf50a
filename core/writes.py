"""Writes to an index that is served: the request, its result, and the protocol of the writer.

The service sends each write over a Unix socket to the one process that changes its indexes. A
message is a frame: its length as 4 bytes, most significant first, and JSON. The service connects,
sends `{"write": …}` and gets `{"written": …}` or `{"error": …}`. With `"accepted": true` in the
message it first gets `{"accepted": ID}`. `{"state": ID, "index": NAME}` asks how that write ended:
the answer is `{"written": …}`, `{"error": …}` or `{"waiting": true}`.

`{"create": {"name": NAME, "like": NAME, "fields": […]}}` and `{"delete": NAME}` create and delete
an index; the answer is `{"done": …}` or `{"error": …}`.
"""

import asyncio
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from core.errors import CareError
from core.types import Conjunction, Document

# Largest message [bytes]: a request body of the largest size, with room for what JSON escapes.
MAX_FRAME_BYTES = 1 << 28
_LENGTH_BYTES = 4
_TAG_DIGITS = 16

# Codes of rejected records.
INVALID_RECORD = "invalid_record"  # it breaks a rule of `indexer/limits.py` or `indexer/records.py`
DOCUMENT_CHANGED = "document_changed"  # the document is not as `if_match` says
OUTSIDE_GRANT = "outside_grant"  # the record, or the document it replaces, is not in `within`

# Of `if_match`, instead of a tag.
MUST_EXIST, MUST_NOT_EXIST = "*", ""


@dataclass(frozen=True, slots=True)
class Write:
    """What one request changes in an index; the parts are applied in the order of the fields."""

    index: str  # name of the index; no alias
    # Records as of a JSONL corpus (`_id`, `text`, `title`, `metadata`), which are checked by the
    # writer. A record replaces the document with its id; of two with one id the later.
    put: tuple[dict[str, Any], ...] = ()
    # Pairs of an id and the metadata that replace those of its document.
    patch: tuple[tuple[str, dict[str, Any]], ...] = ()
    delete: tuple[str, ...] = ()  # ids of documents to delete
    # Conditions: documents that meet all of them are deleted. None deletes none, and no condition
    # deletes all.
    delete_where: Conjunction | None = None
    # What bounds the documents of the caller, if anything. Others do not exist for `patch`,
    # `delete` and `delete_where`; `put` neither replaces one nor makes one (`OUTSIDE_GRANT`).
    within: Conjunction | None = None
    # The tag that the document with an id must have before it is replaced, patched or deleted
    # (`document_tag`), `MUST_EXIST` or `MUST_NOT_EXIST`. A record or id for which this does not
    # hold is rejected (`DOCUMENT_CHANGED`).
    if_match: Mapping[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Returns the write as JSON types."""
        return {
            "index": self.index,
            "put": self.put,
            "patch": self.patch,
            "delete": self.delete,
            "delete_where": None if self.delete_where is None else self.delete_where.as_json(),
            "within": None if self.within is None else self.within.as_json(),
            "if_match": dict(self.if_match),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Returns the write that `as_json` has written."""
        where, within = value["delete_where"], value["within"]
        return cls(
            index=value["index"],
            put=tuple(value["put"]),
            patch=tuple((id_, metadata) for id_, metadata in value["patch"]),
            delete=tuple(value["delete"]),
            delete_where=None if where is None else Conjunction.from_json(where),
            within=None if within is None else Conjunction.from_json(within),
            if_match=value["if_match"],
        )


@dataclass(frozen=True, slots=True)
class Rejected:
    """A record or id of a write that changes nothing."""

    position: int  # its position in `put`, `patch` or `delete`, from 0
    id: str | None  # its id, if it has a valid one
    code: str  # stable identifier of the reason, such as `INVALID_RECORD`
    reason: str  # what is wrong, without text of the record

    def as_json(self) -> dict[str, Any]:
        """Returns the fields as JSON types."""
        return {name: getattr(self, name) for name in ("position", "id", "code", "reason")}


@dataclass(frozen=True, slots=True)
class Written:
    """What a write has changed. Its changes are on disk, in the version that it names."""

    # Id of the version that has the changes: a new one, or the active one if the write changes
    # nothing.
    version: str
    number: int  # number of that version; later versions have larger numbers
    added: int = 0  # documents with new ids
    replaced: int = 0  # documents whose text, title or metadata are others now
    deleted: int = 0  # documents that are gone
    unchanged: int = 0  # records of `put` and `patch` that are equal to their documents
    missing: tuple[str, ...] = ()  # ids of `patch` and `delete` that no document has
    rejected: tuple[Rejected, ...] = ()  # records and ids that change nothing, each with its reason

    def as_json(self) -> dict[str, Any]:
        """Returns the fields as JSON types."""
        value = {name: getattr(self, name) for name in self.__slots__}
        return value | {"rejected": [one.as_json() for one in self.rejected]}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Returns the result that `as_json` has written."""
        rejected = tuple(Rejected(**one) for one in value["rejected"])
        return cls(**{**value, "missing": tuple(value["missing"]), "rejected": rejected})


def document_tag(document: Document, *others: Document) -> str:
    """Returns the tag of a document, which its title, text and metadata determine.

    Of a document that is split, all chunks are given, in order.
    """
    texts = [document.text, *(other.text for other in others)]
    content = [document.title, texts if others else document.text, document.metadata]
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_TAG_DIGITS]


def error_json(error: CareError) -> dict[str, Any]:
    """Returns an error as JSON types; `kind` is the name of its class."""
    kind = type(error).__name__
    return {"code": error.code, "message": str(error), "fields": error.fields, "kind": kind}


def frame(message: Any) -> bytes:
    """Returns a message as a frame; CareError if it is longer than `MAX_FRAME_BYTES`."""
    content = json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode()
    _check(len(content))
    return len(content).to_bytes(_LENGTH_BYTES, "big") + content


async def read_frame(reader: asyncio.StreamReader) -> tuple[Any, int]:
    """Returns the next message and its length [bytes].

    Raises:
        CareError: If it is longer than `MAX_FRAME_BYTES`.
        asyncio.IncompleteReadError: If the other side has ended; `partial` is then what has arrived
            of the length or of the content.
    """
    length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
    _check(length)
    return json.loads(await reader.readexactly(length)), length


def _check(length: int) -> None:
    if length > MAX_FRAME_BYTES:
        message = f"a message to the writer has {length} bytes; the limit is {MAX_FRAME_BYTES}"
        raise CareError(message, code="frame_too_long", limit=MAX_FRAME_BYTES)
