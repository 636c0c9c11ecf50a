import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.sentences import MAX_CHARS, sentence_ends, sentences


def split(text: str, max_chars: int = MAX_CHARS) -> list[str]:
    return [text[start:end] for start, end in sentences(text, max_chars)]


@pytest.mark.parametrize(
    "parts",
    [
        ["多喝水。", "少吃盐！", "发热？", "咳嗽；", "失眠…", "乏力"],
        ["他问：“要紧吗？！”", "（多半不要紧。）", "复查『肝功能！』」", "完"],
        ["每天3.5克，每次1.5-2.0片，血压140/90；", "体温37.3~38.5℃。"],
        ["Vit. C每天100 mg。", "见No. 3和Fig. 2，e.g. 幽门螺杆菌。"],
        ["由H. pylori引起，也见于E. coli。", "Rest well. ", "Drink. "],
        ["1. 多喝水。", "2. 少吃盐. ", "(3). 早睡"],
        ["一、病因\n", "感染. \n", "a. 细菌\n", "b. 病毒"],
        ["维生素C. ", "多喝水"],
    ],
)
def test_examples(parts: list[str]) -> None:
    assert split("".join(parts)) == [part.strip() for part in parts]


def test_white_space_and_marks_alone_are_no_sentences() -> None:
    assert split(" \n。。。\u3000头痛 。 \r\n……！\n\n") == ["头痛 。"]
    assert split("") == split(" \n") == []


def test_long_sentences_are_cut_after_commas() -> None:
    assert split("头痛，发热、咳嗽，乏力。好。", 8) == ["头痛，发热、", "咳嗽，乏力。", "好。"]
    assert split("头痛,每天1,000单位", 9) == ["头痛,", "每天1,000单位"]
    assert split("头" * 17, 8) == ["头" * 8, "头" * 8, "头"]
    assert [len(part) for part in split("，".join(["血压高"] * 100))] == [200, 199]


def test_ends_are_after_marks_quotes_and_white_space() -> None:
    text = "他说“头痛。”  又3.5次\n完"
    assert [text[end:] for end in sentence_ends(text)] == ["又3.5次\n完", "完"]


texts = st.lists(
    st.sampled_from(
        [
            *("高血压", "头", "abc", "3.5", "Vit. ", "e.g. ", "1. ", "H. p", "1,000"),
            *("。", "！", "？”", "…", ".", ". ", ".) ", "；", "，", "、", ",", "（", "“"),
            *("\n", "\r\n", " ", "\u3000", "\u200b", "\u0301", "😀", "_", "\x00"),
        ]
    ),
    max_size=80,
).map("".join)


@given(text=texts, max_chars=st.integers(1, 40))
def test_sentences_of_any_text(text: str, max_chars: int) -> None:
    spans = sentences(text, max_chars)
    for start, end in spans:
        part = text[start:end]
        assert 0 < len(part) <= max_chars
        assert part == part.strip()
        assert re.search(r"\w", part)
    assert all(a[1] <= b[0] for a, b in pairwise(spans))
    covered = {at for span in spans for at in range(*span)}
    assert {at for at, character in enumerate(text) if re.match(r"\w", character)} <= covered


@given(text=texts)
def test_a_sentence_ends_only_where_the_shared_rule_ends_one(text: str) -> None:
    ends = {len(text[:end].rstrip()) for end in sentence_ends(text)} | {len(text.rstrip())}
    assert {end for _, end in sentences(text, max_chars=10_000)} <= ends
