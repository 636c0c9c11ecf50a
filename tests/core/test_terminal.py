import io
import json

import pytest

from core.terminal import shown, shown_json, shown_lines

# Ranges of characters that act on a terminal or on the direction of its text.
ACTIVE = [
    chr(code)
    for first, last in [
        (0, 0x1F),
        (0x7F, 0x9F),
        (0x61C, 0x61C),
        (0x200E, 0x200F),
        (0x2028, 0x202E),
        (0x2066, 0x2069),
        (0xD800, 0xDFFF),
    ]
    for code in range(first, last + 1)
]


def test_characters_that_act_on_a_terminal_are_escaped() -> None:
    for character in ACTIVE:
        found = shown(f"头{character}痛")
        assert (found[0], found[1], found[-1]) == ("头", "\\", "痛")
        assert not set(found) & set(ACTIVE)
    assert shown("\x1b[2J\u202e\x9b\r") == r"\x1b[2J\u202e\x9b\r"


@pytest.mark.parametrize("text", ["头痛　２００ｍｇ", "é–…", "👨\u200d👩", "\ue000", "\\x1b"])
def test_other_characters_stay(text: str) -> None:
    assert shown(text) == text


def test_lines_stay_lines() -> None:
    assert shown_lines("a\x1b\nb\u2028") == "a\\x1b\nb\\u2028"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "gbk", "ascii", "latin-1", "shift_jis"])
def test_json_is_valid_in_each_encoding(encoding: str) -> None:
    values = [*ACTIVE, "头痛é😀\U00020bb7"]
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    text = shown_json(json.dumps(values, ensure_ascii=False), stream)
    assert not set(text) & set(ACTIVE)
    assert json.loads(text.encode(encoding).decode(encoding)) == values
    assert ("头" in text) == encoding.startswith("utf")
