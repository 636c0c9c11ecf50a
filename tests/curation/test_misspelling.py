"""Errors of typing and of speech recognition."""

import random

import pytest

from curation.misspelling import misspell, with_errors

QUERIES = {"q1": "高血压患者能吃冬瓜吗？", "q2": "糖尿病视网膜病变怎么治疗", "q3": "HPV 16"}


@pytest.mark.parametrize("errors", [1, 2, 4])
def test_few_characters_are_wrong(errors: int) -> None:
    made = list(misspell(QUERIES, errors=errors, versions=5))
    assert [m.original for m in made] == ["q1"] * 5 + ["q2"] * 5
    assert len({m.text for m in made}) == 10
    for m in made:
        original = QUERIES[m.original]
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
    alone = list(misspell({"q2": QUERIES["q2"]}, versions=2))
    assert [m for m in misspell(QUERIES, versions=2) if m.original == "q2"] == alone
    assert alone != list(misspell({"q2": QUERIES["q2"]}, versions=2, seed=1))
