"""Distribution and order of sampled questions and requests."""

from argparse import ArgumentParser
from collections import Counter
from pathlib import Path

import pytest

from core.errors import DataError
from loadtest.traffic import Mix, Traffic, departments_of, read_texts
from tests.errors import raises

TEXTS = [f"问题{i}" for i in range(10)]


def test_new_questions_repeat_only_after_a_full_cycle() -> None:
    questions = Traffic(["发热怎么办"], seed=1)
    total = 2 * 99 * 365
    first = [questions.new() for _ in range(total)]
    assert len(set(first)) == total
    assert questions.new() == first[0]
    assert "发热怎么办（女，99岁，病程365天）" in first


def test_new_questions_use_all_texts() -> None:
    questions = Traffic(TEXTS, seed=1)
    sources = Counter(questions.new().split("（")[0] for _ in range(1000))
    assert set(sources) == set(TEXTS)


def test_the_seed_determines_the_order() -> None:
    def draw(seed: int) -> list[str]:
        questions = Traffic(TEXTS, seed)
        return [questions.new() for _ in range(20)] + [questions.repeated() for _ in range(20)]

    assert draw(1) == draw(1)
    assert not set(draw(1)[:20]) & set(draw(2)[:20])


def test_repeated_questions_follow_zipfs_law() -> None:
    questions = Traffic(TEXTS, seed=1)
    counts = Counter(questions.repeated() for _ in range(20_000))
    harmonic = sum(1 / rank for rank in range(1, 11))
    for rank, text in enumerate(TEXTS, start=1):
        assert counts[text] / 20_000 == pytest.approx(1 / rank / harmonic, rel=0.1)


@pytest.mark.parametrize("texts", [[], ["发热", "发热"]])
def test_questions_must_be_present_and_distinct(texts: list[str]) -> None:
    with pytest.raises(ValueError):
        Traffic(texts, seed=1)


def test_equal_texts_of_a_file_are_read_once(tmp_path: Path) -> None:
    path = tmp_path / "queries.jsonl"
    path.write_text('{"text": "甲"}\n{"text": "乙"}\n{"text": "甲"}\n', encoding="utf-8")
    assert read_texts(path) == ["甲", "乙"]


def test_a_record_without_text_is_an_error_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "queries.jsonl"
    path.write_text('{"text": "甲"}\n{"_id": "q2"}\n', encoding="utf-8")
    with raises(DataError, "bad_field", path=path, line=2, field="text"):
        read_texts(path)


def test_traffic_has_the_requested_shares() -> None:
    mix = Mix(repeated=0.3, filtered=0.2, batches=0.1, batch_size=4, top_k=7)
    traffic = Traffic(TEXTS, 1, mix, ["儿科", "骨科"])
    requests = [traffic.draw() for _ in range(10_000)]
    names = Counter(name for name, _, _ in requests)
    assert names["/search/batch"] == pytest.approx(1000, rel=0.1)
    assert names["/search filtered"] == pytest.approx(1800, rel=0.1)
    for name, path, body in requests:
        batch = name == "/search/batch"
        assert path == ("/search/batch" if batch else "/search")
        assert len(body["queries"]) == 4 if batch else body["top_k"] == 7
        assert ("filter" in body) == (name == "/search filtered")
    singles = [body["query"] for _, path, body in requests if path == "/search"]
    repeated = sum(text in TEXTS for text in singles)
    assert repeated / len(singles) == pytest.approx(0.3, rel=0.1)
    filters = Counter(b["filter"]["department"][0] for _, _, b in requests if "filter" in b)
    assert set(filters) == {"儿科", "骨科"}


def test_fields_of_the_command_line_are_those_of_each_question() -> None:
    parser = ArgumentParser()
    Mix.add_options(parser)
    arguments = ["--field", "mode=lexical", "--field", "rerank=20", "--batches", "0.5"]
    traffic = Traffic(TEXTS, 1, Mix.of(parser.parse_args(arguments)))
    bodies = [body for _, _, body in (traffic.draw() for _ in range(20))]
    questions = [one for body in bodies for one in body.get("queries", [body])]
    assert {(one["mode"], one["rerank"]) for one in questions} == {("lexical", 20)}
    assert len(questions) > 20


def test_nothing_is_filtered_without_departments() -> None:
    index = {"filters": {"source": ["a"]}}
    traffic = Traffic(TEXTS, 1, Mix(filtered=1.0), departments_of(index))
    assert not any("filter" in traffic.draw()[2] for _ in range(100))
