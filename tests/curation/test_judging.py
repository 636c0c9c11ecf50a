import json
from pathlib import Path
from typing import cast

import pytest
from pydantic import ValidationError

from curation.config import JudgingOptions
from curation.judging import (
    Label,
    consensus,
    grades_model,
    judge,
)
from curation.llm import LanguageModels
from tests.curation.endpoints import Recorder, endpoint, grader, scripted_server


@pytest.mark.parametrize(
    ("grades", "verdict"),
    [
        ("SAS", "positive"),
        ("SAB", "disputed"),
        ("ACD", "disputed"),
        ("BCD", "negative"),
        ("A", "positive"),
        ("B", "negative"),
    ],
)
def test_the_voting_rule(grades: str, verdict: str) -> None:
    assert consensus(cast("list[Label]", list(grades))) == verdict


def test_a_pair_without_a_grade_is_incomplete() -> None:
    assert consensus(["S", None, "S"]) == "incomplete"


def test_the_schema_requires_exactly_the_passages() -> None:
    model = grades_model(2)
    schema = model.model_json_schema()
    assert schema["required"] == ["Passage-0", "Passage-1"]
    assert schema["additionalProperties"] is False
    for bad in ({"Passage-0": "A"}, {"Passage-0": "A", "Passage-1": "E"}):
        with pytest.raises(ValidationError, match="Passage-1"):
            model.model_validate(bad)
    with pytest.raises(ValidationError, match="Passage-2"):
        model.model_validate(dict.fromkeys(("Passage-0", "Passage-1", "Passage-2"), "A"))


@pytest.mark.e2e
def test_incomplete_answers_are_repeated_and_grades_are_mapped_to_documents(
    tmp_path: Path,
) -> None:
    documents = {f"d{i}": f"第{i}段" for i in range(5)}
    truth = dict(zip(documents.values(), "SABCD", strict=True))
    grade = grader(lambda model, _, text: truth[text] if model == "good" else "D")

    def respond(body: dict, handler: object, before: int) -> str:
        answer = json.loads(grade(body))
        if body["model"] == "lame" and len(body["messages"]) == 2:
            answer.pop("Passage-1", None)
        if body["model"] == "bad" and "第4段" in body["messages"][1]["content"]:
            return "{}"
        return json.dumps(answer)

    recorder = Recorder(respond)
    with scripted_server(recorder) as url:
        names = ("good", "lame", "bad")
        judges = [endpoint(url, name) for name in names]
        with LanguageModels(judges, tmp_path / "calls.sqlite", attempts=2) as llm:
            pools = {"q": ["d4", "d0", "d2"], "r": ["d1"], "s": []}
            judgements = judge(
                llm,
                names,
                pools,
                {"q": "问", "r": "问题", "s": "无"},
                documents,
                JudgingOptions(passages_per_call=2),
            )
            (invalid,) = llm.invalid
    grades = {(item.query, item.document): item.grades for item in judgements}
    assert list(grades) == [("q", "d4"), ("q", "d0"), ("q", "d2"), ("r", "d1")]
    assert grades["q", "d4"] == {"good": "D", "lame": "D", "bad": None}
    assert grades["q", "d0"] == {"good": "S", "lame": "D", "bad": None}
    assert grades["q", "d2"] == {"good": "B", "lame": "D", "bad": "D"}
    assert grades["r", "d1"] == {"good": "A", "lame": "D", "bad": "D"}
    assert (invalid.endpoint, invalid.id) == ("bad", "q d4 d0")
    assert "Passage-0" in invalid.tried[0]["complaint"]
