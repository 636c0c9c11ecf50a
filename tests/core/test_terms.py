import random
import re
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import DataError
from core.terms import EVERYDAY_TERMS, MAX_CHARS, MAX_ROWS, MAX_TERMS, TermList, term_list
from tests.errors import raises

TERMS = TermList(
    {
        "拉肚子": ("腹泻",),
        "肚子": ("腹部",),
        "老寒腿": ("膝关节骨关节炎", "关节痛"),
        "中风": ("脑卒中",),
        "中风险": ("中风险",),
        "hb": ("血红蛋白",),
        "vit c": ("维生素C",),
    }
)


def written(folder: Path, content: str | bytes) -> Path:
    path = folder / "terms.tsv"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_a_list_is_read(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "\ufeff# words\n\n 拉 肚子 \t腹泻\r\nHB\t血红蛋白，Hb, Hb\n拉 肚子\t腹泻\ne\u0301\tÉ",
    )
    assert TermList.read(path).terms == {
        "拉 肚子": ("腹泻",),
        "hb": ("血红蛋白", "Hb"),
        "é": ("É",),
    }
    assert TermList.read(written(tmp_path, "")).terms == {}


@pytest.mark.parametrize(
    ("line", "number"),
    [
        ("拉肚子", 2),
        ("拉肚子\t腹泻\t", 2),
        ("\t腹泻", 2),
        ("\u200b\t腹泻", 2),
        ("拉肚子\t ", 2),
        ("拉肚子\t腹泻,", 2),
        ("头" * (MAX_CHARS + 1) + "\t头痛", 2),
        ("头疼\t" + "痛" * (MAX_CHARS + 1), 2),
        ("头疼\t" + ",".join(map(str, range(MAX_TERMS + 1))), 2),
        ("HB\t血红蛋白\nhb\t乙肝", 3),
        ("\n" + "头疼\t头痛\n" * MAX_ROWS, MAX_ROWS + 2),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, number: int) -> None:
    path = written(tmp_path, f"发烧\t发热\n{line}")
    with raises(DataError, "bad_term_list", path=path, line=number):
        TermList.read(path)


def test_a_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    with raises(DataError, "not_utf8", path=tmp_path / "terms.tsv"):
        TermList.read(written(tmp_path, "拉肚子\t腹泻".encode("gb18030")))
    with raises(DataError, "unreadable", path=tmp_path):
        TermList.read(tmp_path)


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("老拉肚子，肚子疼", ["腹泻", "腹部"]),
        ("拉肚子又拉肚子", ["腹泻"]),
        ("老寒腿关节痛", ["膝关节骨关节炎"]),
        ("中风了，属于中风险吗", ["脑卒中"]),
        ("属于中风险吗", []),
        ("HB低，HbA1c高", ["血红蛋白"]),
        ("HbA1c，1hb，ahb", []),
        ("补VIT  C片", ["维生素C"]),
        ("补维生素c，vit c", []),
        ("", []),
    ],
)
def test_terms_of_a_text(text: str, terms: list[str]) -> None:
    assert TERMS.matches(text) == terms
    assert TERMS.expand(text) == " ".join([text, *terms])


def test_words_that_documents_use_are_left_out() -> None:
    terms = TermList(
        {
            "大三阳": ("乙肝", "HBV感染"),
            "拉肚子": ("腹泻",),
            "羊癫疯": ("癫痫",),
            "伤风": ("感冒",),
            "破伤风": ("破伤风",),
        }
    )
    texts = ["大三阳是乙肝", "HBV感染", "hbv感染", "拉肚子", *["腹泻，腹泻"] * 9, "破伤风"]
    assert list(terms.for_documents(texts).terms) == ["羊癫疯", "破伤风"]
    assert list(terms.for_documents([*texts, "腹泻"]).terms) == ["拉肚子", "羊癫疯", "破伤风"]
    assert list(terms.for_documents(texts, ratio=0.5).terms)[:2] == ["大三阳", "拉肚子"]
    assert terms.for_documents([]) == terms
    # "hp" in "HPV" is another word.
    names = TermList({"hp": ("幽门螺杆菌",)})
    assert names.for_documents(["HPV", "幽门螺杆菌"]) == names


def test_a_text_is_split_at_the_words_of_a_list() -> None:
    assert TERMS.split("老拉肚子，HB低") == [
        ("老",),
        ("拉肚子", "腹泻"),
        ("，",),
        ("hb", "血红蛋白"),
        ("低",),
    ]
    assert TERMS.split("头痛") == [("头痛",)]
    assert TERMS.split("") == []


words = st.text("ab头痛é", min_size=1, max_size=4)
lists = st.dictionaries(words, st.tuples(st.sampled_from(["甲", "乙", "丙b"])), max_size=8)


@given(terms=lists, text=st.text("ab头痛é 丙", max_size=40))
def test_terms_equal_those_of_an_alternation(terms: dict[str, tuple[str, ...]], text: str) -> None:
    longest = sorted(terms, key=len, reverse=True)
    inside = "(?:(?<![a-z])|(?![a-z]))(?:%s)(?:(?<![a-z])|(?![a-z]))"
    pattern = re.compile(inside % "|".join(longest)) if terms else re.compile("(?!)")
    folded = " ".join(text.split())
    found = dict.fromkeys(terms[match.group()][0] for match in pattern.finditer(folded))
    assert TermList(terms).matches(text) == [term for term in found if term not in folded]


@given(terms=lists, text=st.text("AB头痛é\u0301 \u200b丙", max_size=40))
def test_terms_do_not_depend_on_form_case_or_order(
    terms: dict[str, tuple[str, ...]], text: str
) -> None:
    found = TermList(terms).matches(text)
    shuffled = random.Random(0).sample(list(terms.items()), len(terms))
    assert TermList(dict(shuffled)).matches(text) == found
    assert TermList(terms).matches(unicodedata.normalize("NFD", text.lower())) == found


def test_each_everyday_word_has_an_effect() -> None:
    terms = TermList.read(EVERYDAY_TERMS)
    assert len(terms.terms) >= 300
    for word, meant in terms.terms.items():
        assert len(word) >= 2
        found = terms.matches(word)
        assert found == [term for term in meant if term.casefold() not in word]
        assert found or meant == (word,)
        assert not any(
            word.startswith(other)
            for other in terms.terms
            if other != word and terms.terms[other] == meant
        )


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("我爸老寒腿又犯了", ["膝骨关节炎", "膝关节骨关节炎"]),
        ("打破伤风针，腰突然疼", ["破伤风疫苗接种", "破伤风抗毒素"]),
        ("血压低于多少算低血压", []),
        ("会有严重影响吗", []),
        ("指甲流血", []),
        ("属于中风险，和脑中风有关吗", ["脑卒中"]),
    ],
)
def test_examples_of_everyday_words(text: str, terms: list[str]) -> None:
    assert TermList.read(EVERYDAY_TERMS).matches(text) == terms


def test_lists_have_names(tmp_path: Path) -> None:
    assert term_list("everyday") == TermList.read(EVERYDAY_TERMS)
    assert term_list("none").terms == {}
    path = written(tmp_path, "拉肚子\t腹泻")
    assert term_list(path) == TermList.read(path)
    with raises(DataError, "unreadable", path=Path("everday")):
        term_list("everday")
