import json
from pathlib import Path
from typing import Any

import pytest

from core.errors import CareError
from models.curation.config import StsConfig
from models.curation.scripted import scripted_server
from models.curation.sts import Rewrites, check_rewrites, find_term, read_synonyms, write_sts
from tests.conftest import write_jsonl
from tests.curation.endpoints import Recorder, endpoint

QUESTION = "心梗病人能不能喝酒？"
GOOD = {
    "same_with_synonym": "心肌梗死病人可以喝酒吗？",
    "other_with_synonym": "心肌梗死病人有什么症状？",
    "other_without_synonym": "心梗病人怎么治疗？",
}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({}, ""),
        ({"same_with_synonym": "心梗病人可以喝酒吗？？"}, "does not contain '心肌梗死'"),
        ({"other_with_synonym": "心肌梗死和心梗是什么？"}, "other_with_synonym contains '心梗'"),
        ({"other_without_synonym": "心梗就是心肌梗死吗？"}, "contains '心肌梗死'"),
        ({"other_without_synonym": "病人怎么治疗才好呢？"}, "does not contain '心梗'"),
        ({"same_with_synonym": "心肌梗死能喝"}, "has 6 characters, not 7 to 13"),
        ({"same_with_synonym": "心肌梗死病人到底可不可以喝酒？"}, "has 15 characters"),
        ({"same_with_synonym": GOOD["other_with_synonym"]}, "are equal"),
        ({"other_without_synonym": QUESTION}, "are equal"),
    ],
)
def test_each_constraint_is_checked(change: dict[str, str], complaint: str) -> None:
    rewrites = Rewrites(**(GOOD | change))
    found = check_rewrites(
        rewrites, question=QUESTION, term="心梗", synonym="心肌梗死", chars=(7, 13)
    )
    assert complaint in found and bool(found) == bool(complaint)


def test_synonyms_that_code_cannot_tell_apart_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "synonyms.tsv"
    path.write_text("心梗\t心肌梗死\t急性心梗\n\n糖尿病\t2型糖尿病\n", encoding="utf-8")
    assert read_synonyms(path) == {"心梗": ["心肌梗死"]}
    path.write_text("心梗\n", encoding="utf-8")
    with pytest.raises(CareError, match=r"synonyms.tsv line 1 is not a term"):
        read_synonyms(path)


def test_the_longest_term_is_taken() -> None:
    assert find_term("高血压病怎么治", {"血压": ["a"], "高血压": ["b"]}) == "高血压"
    assert find_term("头痛", {"血压": ["a"]}) is None


def test_pairs_from_end_to_end(tmp_path: Path) -> None:
    write_jsonl(
        tmp_path / "questions.jsonl",
        [
            {"_id": "q1", "text": QUESTION},
            {"_id": "q2", "text": "头痛怎么办"},
            {"_id": "q3", "text": "心梗和心肌梗死一样吗"},
            {"_id": "q4", "text": "心梗病人能不能开车？"},
        ],
    )
    (tmp_path / "synonyms.tsv").write_text("心梗\t心肌梗死\n", encoding="utf-8")

    def respond(body: Any, handler: object, _: int) -> str:
        first = len(body["messages"]) == 2
        if "开车" in body["messages"][1]["content"]:
            return json.dumps(GOOD | {"same_with_synonym": "太短"})
        return json.dumps(GOOD | ({"same_with_synonym": QUESTION} if first else {}))

    recorder = Recorder(respond)
    with scripted_server(recorder) as url:
        config = StsConfig.model_validate(
            {
                "questions": tmp_path / "questions.jsonl",
                "synonyms": tmp_path / "synonyms.tsv",
                "output": tmp_path / "out",
                "attempts": 2,
                "writer": endpoint(url, "writer"),
            }
        )
        statistics = write_sts(config)
    assert statistics == {
        "questions": 4,
        "with_a_term": 2,
        "asked": 2,
        "set_aside": 1,
        "pairs": 3,
    }
    table = (tmp_path / "out" / "sts.tsv").read_text("utf-8").splitlines()
    assert table[0] == "text1\ttext2\tlabel"
    assert [line.split("\t") for line in table[1:]] == [
        [QUESTION, GOOD["same_with_synonym"], "1"],
        [QUESTION, GOOD["other_with_synonym"], "0"],
        [QUESTION, GOOD["other_without_synonym"], "0"],
    ]
    again = next(body for body in recorder.bodies if len(body["messages"]) == 4)
    assert "same_with_synonym does not contain '心肌梗死'" in again["messages"][3]["content"]
    aside = json.loads((tmp_path / "out" / "set-aside.jsonl").read_text("utf-8"))
    assert (aside["id"], len(aside["tried"])) == ("q4", 2)
