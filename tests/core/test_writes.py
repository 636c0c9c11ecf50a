import asyncio
import json
from dataclasses import replace

import pytest

from core import writes
from core.conditions import parse_filter
from core.errors import CareError
from core.types import NO_CONDITIONS, Document
from core.writes import Rejected, Write, Written, document_tag, frame, read_frame
from tests.errors import raises

WRITE = Write(
    "ward",
    put=({"_id": "1", "text": "高血压", "metadata": {"year": 2020, "tags": ["a"]}},),
    patch=(("2", {"year": 1.5}),),
    delete=("3",),
    delete_where=parse_filter({"year": {"gte": 2019, "not": [True, "x"]}}),
    within=parse_filter({"department": ["内科", 1]}),
    if_match={"1": "*", "2": ""},
)
WRITTEN = Written(
    "v", 7, added=1, replaced=2, deleted=3, unchanged=4, missing=("3",),
    rejected=(Rejected(0, None, writes.INVALID_RECORD, "text is empty"),),
)  # fmt: skip


async def read(content: bytes) -> object:
    reader = asyncio.StreamReader()
    reader.feed_data(content)
    reader.feed_eof()
    message, length = await read_frame(reader)
    assert length == len(content) - 4
    return message


@pytest.mark.parametrize(
    "write", [WRITE, Write("ward"), replace(WRITE, delete_where=NO_CONDITIONS)]
)
def test_a_write_survives_a_frame(write: Write) -> None:
    assert Write.from_json(asyncio.run(read(frame(write.as_json())))) == write  # type: ignore[arg-type]


def test_a_result_survives_a_frame() -> None:
    assert Written.from_json(asyncio.run(read(frame(WRITTEN.as_json())))) == WRITTEN  # type: ignore[arg-type]


def test_a_frame_that_is_cut_off_is_an_error() -> None:
    content = frame(WRITE.as_json())
    for end in (0, 3, 4, len(content) - 1):
        with pytest.raises(asyncio.IncompleteReadError):
            asyncio.run(read(content[:end]))


def test_frames_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    content = frame("x" * 98)
    monkeypatch.setattr(writes, "MAX_FRAME_BYTES", 99)
    with raises(CareError, "frame_too_long", limit=99):
        asyncio.run(read(content))
    with raises(CareError, "frame_too_long", limit=99):
        frame("x" * 98)
    assert frame("x" * 97)


def test_the_tag_is_that_of_title_text_and_metadata() -> None:
    document = Document("1", "text", "title", {"a": 1, "b": 2})
    tag = document_tag(document)
    same = Document("2", "text", "title", {"b": 2, "a": 1})
    assert document_tag(same) == tag
    for other in (
        replace(document, text="texts"),
        replace(document, title="titles"),
        replace(document, metadata={"a": 1.0, "b": 2}),
        replace(document, metadata={"a": True, "b": 2}),
        replace(document, title="title", text="", metadata={"a": 1, "b": 2}),
    ):
        assert document_tag(other) != tag
    stored = replace(document, metadata=json.loads(json.dumps(document.metadata)))
    assert document_tag(stored) == tag
    chunks = [replace(document, text=text, parent="1") for text in ("te", "xt")]
    assert document_tag(*chunks) not in {tag, document_tag(*reversed(chunks))}
