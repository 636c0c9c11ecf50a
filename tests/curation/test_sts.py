import json
from pathlib import Path
from typing import Any

import pytest

from core.errors import CareError, DataError
from core.records import read_jsonl
from curation.config import StsConfig
from curation.sts import Rewrites, check_rewrites, find_term, read_synonyms, write_sts
from tests.conftest import write_jsonl
from tests.curation.endpoints import Recorder, endpoint, scripted_server
from tests.errors import raises

QUESTION = "心梗病人能不能喝酒？"
GOOD = {
    "same_with_synonym": "心肌梗死病人可以喝酒吗？",
    "other_with_synonym": "心肌梗死病人有什么症状？",
    "other_without_synonym": "心梗病人怎么治疗？",
}


def config(folder: Path, url: str, splits: dict[str, Any], **more: Any) -> StsConfig:
    """The configuration of a command that writes to `folder`, with one term."""
    (folder / "synonyms.tsv").write_text("心梗\t心肌梗死\n", encoding="utf-8")
    facts = {"splits": splits, "synonyms": folder / "synonyms.tsv", "output": folder / "out"}
    return StsConfig.model_validate(facts | {"writer": endpoint(url, "writer")} | more)


@pytest.mark.parametrize(
    ("change", "mentioned"),
    [
        ({}, None),
        ({"same_with_synonym": "心梗病人可以喝酒吗？？"}, ["same_with_synonym", "'心肌梗死'"]),
        ({"other_with_synonym": "心肌梗死和心梗是什么？"}, ["other_with_synonym", "'心梗'"]),
        ({"other_without_synonym": "心梗就是心肌梗死吗？"}, ["'心肌梗死'"]),
        ({"other_without_synonym": "病人怎么治疗才好呢？"}, ["'心梗'"]),
        ({"same_with_synonym": "心肌梗死能喝"}, ["6", "7", "13"]),
        ({"same_with_synonym": "心肌梗死病人到底可不可以喝酒？"}, ["15", "13"]),
        ({"same_with_synonym": GOOD["other_with_synonym"]}, []),
        ({"other_without_synonym": QUESTION}, []),
    ],
)
def test_each_constraint_is_checked(change: dict[str, str], mentioned: list[str] | None) -> None:
    rewrites = Rewrites(**(GOOD | change))
    complaint = check_rewrites(
        rewrites, question=QUESTION, term="心梗", synonym="心肌梗死", chars=(7, 13)
    )
    assert bool(complaint) == (mentioned is not None)
    assert all(words in complaint for words in mentioned or [])


def test_synonyms_that_contain_their_term_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "synonyms.tsv"
    path.write_text("心梗\t心肌梗死\t急性心梗\n\n糖尿病\t2型糖尿病\n", encoding="utf-8")
    assert read_synonyms(path) == {"心梗": ["心肌梗死"]}
    path.write_text("心梗\n", encoding="utf-8")
    with raises(DataError, code="not_synonyms", path=path, line=1):
        read_synonyms(path)


def test_the_longest_term_is_taken() -> None:
    assert find_term("高血压病怎么治", {"血压": ["a"], "高血压": ["b"]}) == "高血压"
    assert find_term("头痛", {"血压": ["a"]}) is None
    assert find_term("高血压即a", {"血压": ["b"], "高血压": ["a"]}) is None


def test_pairs_from_end_to_end(tmp_path: Path) -> None:
    texts = QUESTION, "头痛怎么办", "心梗和心肌梗死一样吗", "心梗病人能不能开车？"
    records = [{"_id": f"q{number}", "text": text} for number, text in enumerate(texts, 1)]
    questions = write_jsonl(tmp_path / "questions.jsonl", records)

    def respond(body: Any, handler: object, _: int) -> str:
        first = len(body["messages"]) == 2
        if "开车" in body["messages"][1]["content"]:
            return json.dumps(GOOD | {"same_with_synonym": "太短"})
        return json.dumps(GOOD | ({"same_with_synonym": QUESTION} if first else {}))

    recorder = Recorder(respond)
    with scripted_server(recorder) as url:
        splits = {"train": {"questions": questions}}
        statistics = write_sts(config(tmp_path, url, splits, attempts=2))
    assert statistics == {"train": {"asked": 2, "invalid": 1, "pairs": 3}}
    table = (tmp_path / "out" / "train.tsv").read_text("utf-8").splitlines()
    assert table[0] == "text1\ttext2\tlabel"
    assert [line.split("\t") for line in table[1:]] == [
        [QUESTION, GOOD["same_with_synonym"], "1"],
        [QUESTION, GOOD["other_with_synonym"], "0"],
        [QUESTION, GOOD["other_without_synonym"], "0"],
    ]
    again = next(body for body in recorder.bodies if len(body["messages"]) == 4)
    complaint = again["messages"][3]["content"]
    assert "same_with_synonym" in complaint and "'心肌梗死'" in complaint
    invalid = json.loads((tmp_path / "out" / "invalid-answers.jsonl").read_text("utf-8"))
    assert (invalid["id"], len(invalid["tried"])) == ("q4", 2)


def test_questions_without_a_term(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "questions.jsonl", [{"_id": "q1", "text": "头痛怎么办"}])
    with raises(CareError, code="no_term", path=path):
        write_sts(config(tmp_path, "http://localhost:9/v1", {"test": {"questions": path}}))


def test_a_scored_split_has_one_rewrite_of_each_question(tmp_path: Path) -> None:
    texts = [f"心梗病人能不能吃{food}？" for food in "米面鱼肉蛋奶菜果糖盐油醋"]
    rows = [{"_id": f"q{number}", "text": text} for number, text in enumerate(texts)]
    splits = {
        "test": {"questions": write_jsonl(tmp_path / "test.jsonl", rows[:10])},
        # Two of its questions belong to the first split.
        "train": {"questions": write_jsonl(tmp_path / "train.jsonl", rows[8:])},
    }

    def respond(body: Any, *_: object) -> str:
        text = json.loads(body["messages"][1]["content"])["question"]
        other = text.replace("能不能", "要不要")
        synonym = text.replace("心梗", "心肌梗死"), other.replace("心梗", "心肌梗死")
        return json.dumps(dict(zip(GOOD, (*synonym, other), strict=True)))

    with scripted_server(respond) as url:
        statistics = write_sts(config(tmp_path, url, splits))
        write_sts(config(tmp_path, url, splits, rewrites="all", output=tmp_path / "all"))
    assert [statistics[name]["pairs"] for name in splits] == [10, 6]
    test, train, whole = (
        [record for _, record in read_jsonl(tmp_path / path)]
        for path in ("out/test.jsonl", "out/train.jsonl", "all/test.jsonl")
    )
    assert len({row["text1"] for row in test}) == 10
    assert {row["kind"] for row in test} == set(GOOD)
    assert {row["text1"] for row in train}.isdisjoint(row["text1"] for row in test)
    assert len(whole) == 30
