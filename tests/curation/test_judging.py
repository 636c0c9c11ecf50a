import json
from pathlib import Path
from typing import cast

import pytest
from pydantic import ValidationError

from curation.agreement import agreement
from curation.config import JudgingOptions
from curation.judging import Judgement, Label, consensus, grades_model, judge
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


def judgements(*rows: str) -> list[Judgement]:
    """Each row is a judge, each letter a pair; a point is a missing grade."""
    return [
        Judgement("q", f"d{i}", {f"j{n}": None if g == "." else g for n, g in enumerate(column)})  # type: ignore[misc]
        for i, column in enumerate(zip(*rows, strict=True))
    ]


def test_agreement_by_hand() -> None:
    result = agreement(judgements("SSBD", "SABD", "SDBB"))
    assert result["verdicts"] == {"positive": 1, "negative": 2, "disputed": 1, "incomplete": 0}
    assert result["dropped"] == 1
    assert result["grades"]["j1"] == {"S": 1, "A": 1, "B": 1, "C": 0, "D": 1}
    assert result["judge_pairs"]["j0 - j1"] == {
        "same_grade": 0.75,
        "same_side": 1.0,
        "cohen_kappa_side": 1.0,
    }
    assert result["judge_pairs"]["j0 - j2"]["same_side"] == 0.75
    # Sides: 3 of 4 pairs unanimous, one 2 to 1: P = (3 + 1/3) / 4; shares 5/12 and 7/12.
    chance = (5 / 12) ** 2 + (7 / 12) ** 2
    assert result["fleiss_kappa_sides"] == pytest.approx((10 / 12 - chance) / (1 - chance))


def test_fleiss_as_published() -> None:
    # Fleiss (1971), as in the article of Wikipedia: 14 raters, 10 subjects, kappa 0.210.
    table = [
        *([0, 0, 0, 0, 14], [0, 2, 6, 4, 2], [0, 0, 3, 5, 6], [0, 3, 9, 2, 0], [2, 2, 8, 1, 1]),
        *([7, 7, 0, 0, 0], [3, 2, 6, 3, 0], [2, 5, 3, 2, 2], [6, 5, 2, 1, 0], [0, 2, 2, 3, 7]),
    ]
    columns = ["".join(g * n for g, n in zip("SABCD", row, strict=True)) for row in table]
    result = agreement(judgements(*map("".join, zip(*columns, strict=True))))
    assert result["fleiss_kappa_grades"] == pytest.approx(0.210, abs=5e-4)


def test_krippendorff_is_ordinal_and_allows_missing_grades() -> None:
    near, far = (agreement(judgements("SSDDB.", second)) for second in ("SADDBC", "SDDDBC"))
    assert near["krippendorff_alpha_ordinal"] > far["krippendorff_alpha_ordinal"]
    assert near["verdicts"]["incomplete"] == 1


def test_krippendorff_as_published() -> None:
    # Krippendorff, Computing Krippendorff's Alpha-Reliability (2011), C: 4 raters, 12 units.
    raters = ["SABBASCSA...", "SABBAACSAD.B", ".BBBABCAADS.", "SABBACCSADS."]
    alpha = agreement(judgements(*raters))["krippendorff_alpha_ordinal"]
    assert alpha == pytest.approx(0.815, abs=5e-4)


@pytest.mark.parametrize("rows", [["SABCD"], ["DDD", "DDD"], ["", ""]])
def test_undefined_measures_are_none(rows: list[str]) -> None:
    result = agreement(judgements(*rows))
    assert result["krippendorff_alpha_ordinal"] is None
    assert result["fleiss_kappa_sides"] is None
