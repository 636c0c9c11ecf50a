"""Synthetic texts for alignment."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import training
from training.experiments.phrases import LONGEST, SHORTEST, Phrases, write
from training.recipe import load_recipe

RECIPE = Path(training.__file__).parent / "recipes" / "care-mini.yaml"
TEXTS = ["高血压患者平时应该注意什么？", "清淡饮食，按时服用降压药，注意休息。定期复查血压。"]


def made(count: int, seed: int = 0, **settings: Any) -> list[str]:
    return list(islice(Phrases(TEXTS, seed, **settings), count))


@pytest.mark.e2e
def test_texts_depend_on_the_seed() -> None:
    texts = made(400)
    assert texts == made(400)
    assert len(set(texts) & set(made(400, seed=1))) < 200


def test_texts_are_short_distinct_filled_templates_and_spans_of_given_texts() -> None:
    texts = made(2000)
    assert len(set(texts)) == len(texts)
    assert {SHORTEST <= len(text) <= LONGEST for text in texts} == {True}
    assert not [text for text in texts if "{" in text or "}" in text]
    assert any(text in TEXTS[1] for text in texts)
    assert sum(text not in "".join(TEXTS) for text in texts) > 200


@pytest.mark.e2e
def test_texts_have_the_requested_lengths() -> None:
    texts = made(300, lengths=(30, 110))
    assert {30 <= len(text) <= 110 for text in texts} == {True}
    assert sum(len(text) > LONGEST for text in texts) > 100


def test_words_belong_to_the_class_of_their_longest_ending() -> None:
    phrases = Phrases(TEXTS, 0)
    classes = [
        phrases.word_class(word) for word in ("高尿酸血症", "阿奇霉素", "毛细血管", "拖拉机")
    ]
    assert classes == ["disease", "drug", "organ", None]


def test_only_training_examples_are_read(two_sources: Path, tmp_path: Path) -> None:
    out = tmp_path / "phrases.jsonl"
    changes = [f"variables.data={two_sources}", "dev=null"]
    write(load_recipe(RECIPE, changes), out, count=300, seed=0)
    texts = [json.loads(line)["text"] for line in out.read_text("utf-8").splitlines()]
    assert len(texts) == 300
    # There are no spans of answers that are not in an example, nor of answers of knowledge-qa.
    assert any(text in "清淡饮食，按时服用降压药。" for text in texts)
    assert not any("使用抗生素控制感染" in text or "绝对不会出现的句子" in text for text in texts)
