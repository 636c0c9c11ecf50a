"""Rewording of questions by rules, and errors of typing and of speech recognition."""

import random
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from core.records import read_jsonl
from core.terms import TermList
from curation import rewording
from curation.rewording import Part, Rewording, misspell, reword, with_errors, write_reworded
from tests.conftest import write_jsonl

RULES: dict[str, Any] = yaml.safe_load(
    Path(rewording.__file__).with_suffix(".yaml").read_text("utf-8")
)
QUERIES = {
    "q1": "请问高血压患者能吃冬瓜吗？",
    "q2": "癫痫病怎么治疗？",
    "q3": "宝宝支气管炎怎么办",
    "q4": "大叶性肺炎会传染吗？",
}


def texts_of(part: Part) -> Counter[str]:
    """All texts that a part of the rules adds."""
    rules = [
        *RULES["words"],
        *RULES["endings"],
        *RULES["askers"],
        RULES["orders"],
        RULES["closers"],
    ]
    return Counter(chain.from_iterable(rule[part].split() for rule in rules))


def test_the_parts_have_no_text_in_common() -> None:
    a, b = (texts_of(part) for part in get_args(Part))
    assert not a.keys() & b.keys()
    assert len(a) > 100 and len(b) > 100


def test_no_formal_word_has_two_rules() -> None:
    words = Counter(word for rule in RULES["words"] for word in rule["of"].split())
    assert [word for word, count in words.items() if count > 1] == []


@pytest.mark.parametrize("part", get_args(Part))
def test_rewordings_are_new_distinct_and_name_their_original(part: Part) -> None:
    made = list(reword(QUERIES, part, versions=3))
    assert [m.original for m in made] == [id_ for id_ in QUERIES for _ in range(3)]
    assert [m.id for m in made[:3]] == ["q1-1", "q1-2", "q1-3"]
    texts = [m.text for m in made]
    assert len({*texts, *QUERIES.values()}) == len(texts) + len(QUERIES)
    assert not [text for text in texts if "{" in text or "}" in text or "请问" in text]


def test_ids_of_a_file_may_be_numbers(tmp_path: Path) -> None:
    queries = write_jsonl(tmp_path / "queries.jsonl", [{"id": 1, "text": QUERIES["q1"]}])
    sizes = write_reworded(queries, tmp_path / "made.jsonl", lambda texts: reword(texts, "a"))
    ((_, made),) = read_jsonl(tmp_path / "made.jsonl")
    assert sizes == {"queries": 1, "rewordings": 1}
    assert (made["original"], made["original_text"]) == ("1", QUERIES["q1"])


def test_a_text_that_is_only_an_opener_has_no_empty_rewording() -> None:
    made = [Rewording("a", seed).versions("q", "我想了解", 3) for seed in range(20)]
    assert all(texts and "" not in texts for texts in made)


def test_a_rewording_depends_on_seed_part_and_id_alone() -> None:
    alone = list(reword({"q2": QUERIES["q2"]}, "a", versions=2))
    assert [m for m in reword(QUERIES, "a", versions=2) if m.original == "q2"] == alone
    texts = {reword_first("a", 0), reword_first("a", 1), reword_first("b", 0)}
    assert len(texts) == 3


def reword_first(part: Part, seed: int) -> str:
    return " ".join(made.text for made in reword(QUERIES, part, seed=seed))


def test_the_longest_formal_word_is_replaced() -> None:
    rule = next(rule for rule in RULES["words"] if "高血压患者" in rule["of"].split())
    texts = Rewording("a").versions("q", "高血压患者失眠", 8)
    assert any(word in text for text in texts for word in rule["a"].split())
    assert not any("血压高患者" in text for text in texts)


def test_a_part_of_a_longer_term_is_kept() -> None:
    assert all("大叶性肺炎" in text for text in Rewording("a").versions("q", QUERIES["q4"], 8))
    replaced = list(Rewording("a").versions("q", "肺炎会传染吗", 8))
    assert any("肺上发炎" in text for text in replaced)


def test_who_asks_suits_the_question() -> None:
    asked = {part: {form for _, forms in askers(part) for form in forms} for part in ("a", "b")}
    child = RULES["askers"][0]
    for part in ("a", "b"):
        opened = [
            form
            for text in Rewording(part).versions("q", QUERIES["q3"], 12)
            for form in asked[part]
            if text.startswith(form.removesuffix("{}"))
        ]
        assert opened and set(opened) <= set(child[part].split())


def askers(part: str) -> list[tuple[str, list[str]]]:
    return [(group["of"], group[part].split()) for group in RULES["askers"]]


def test_the_subject_can_follow_what_is_asked() -> None:
    texts = Rewording("b").versions("q", "冠心病能吃冬瓜吗", 15)
    assert any(text.index("冬瓜") < text.index("得的是") for text in texts if "得的是" in text)
    assert any("得的是" in text for text in texts)


def test_words_of_a_list_replace_their_terms() -> None:
    terms = TermList({"心梗": ("心肌梗死", "急性心肌梗死"), "梗死": ("梗死",)})
    made = list(reword({"q": "急性心肌梗死患者能喝酒吗"}, "a", versions=8, terms=terms))
    assert any("心梗" in m.text and "心肌" not in m.text for m in made)
    assert not any("急性心梗" in m.text for m in made)


MISSPELT = {"q1": "高血压患者能吃冬瓜吗？", "q2": "糖尿病视网膜病变怎么治疗", "q3": "HPV 16"}


@pytest.mark.parametrize("errors", [1, 2, 4])
def test_few_characters_are_wrong(errors: int) -> None:
    made = list(misspell(MISSPELT, errors=errors, versions=5))
    assert [m.original for m in made] == ["q1"] * 5 + ["q2"] * 5
    assert len({m.text for m in made}) == 10
    for m in made:
        original = MISSPELT[m.original]
        assert m.text != original
        assert abs(len(m.text) - len(original)) <= errors
        if len(m.text) == len(original):
            assert sum(a != b for a, b in zip(m.text, original, strict=True)) <= errors


def test_a_wrong_character_sounds_like_the_right_one() -> None:
    texts = {with_errors("糖", 1, random.Random(seed)) for seed in range(400)}
    assert {"", "糖糖"} < texts
    assert texts - {"", "糖糖", "糖"} <= set("汤塘搪堂棠膛唐躺淌趟烫倘") | set(
        "坍摊贪瘫滩坛檀痰潭谭谈坦毯袒碳探叹炭"
    )


def test_errors_depend_on_seed_and_id_alone() -> None:
    alone = list(misspell({"q2": MISSPELT["q2"]}, versions=2))
    assert [m for m in misspell(MISSPELT, versions=2) if m.original == "q2"] == alone
    assert alone != list(misspell({"q2": MISSPELT["q2"]}, versions=2, seed=1))
