import json
from pathlib import Path
from typing import Any

import pytest

from care.cli.main import main
from core.errors import CareError
from evaluation.evidence import accuracy, fit, read_marks
from search.evidence import Model, asked, compared
from tests.conftest import write_jsonl
from tests.errors import error_code, raises

SAMPLE = Path(__file__).parents[2] / "data" / "sample"
DISEASES = ["感冒", "胃炎", "头痛", "失眠", "便秘", "湿疹", "贫血", "痛风", "哮喘", "肥胖"]
# Which sentence answers follows from the kind of question, not from its words.
TEXT = "您好，{0}是常见病，{1}。一般由劳累引起，{1}。建议您服用药物治疗，{1}。"
QUESTIONS = {"{}的原因是什么": 1, "{}怎么治疗": 2}


def files(folder: Path, count: int = 120, **changed: Any) -> list[Path]:
    """Files of a corpus, its queries and marks."""
    corpus, queries, marks = [], [], []
    for at in range(count):
        disease = DISEASES[at % 10]
        text = TEXT.format(disease, f"第{at}位")
        question, answers = list(QUESTIONS.items())[at // 10 % 2]
        spans = compared(asked("", None), text).spans
        corpus.append({"_id": f"d{at}", "text": text})
        queries.append({"_id": f"q{at}", "text": question.format(disease)})
        line = {"query-id": f"q{at}", "corpus-id": f"d{at}", "characters": len(text)}
        marks.append(line | {"sentences": [spans[answers]]} | changed)
    named = {"corpus": corpus, "queries": queries, "marks": marks}
    return [write_jsonl(folder / f"{name}.jsonl", lines) for name, lines in named.items()]


def test_a_fit_finds_what_answers_each_kind_of_question(tmp_path: Path) -> None:
    marks, left_out = read_marks(*files(tmp_path))
    assert (len(marks), left_out) == (120, 0)
    model, measured = fit(marks)
    assert measured.right.value > 0.95
    assert measured.shown.value == pytest.approx(0.73, abs=0.02)
    assert accuracy(marks, model).right.value > 0.95
    question = asked("痛风怎么治疗", None)
    assert model.choose(compared(question, TEXT.format("痛风", "第1位")))[0] == 2
    # Of a text without known pairs of characters, the sentence that shares most is chosen.
    assert model.choose(compared(asked("gout", None), "Rest. Gout hurts.")) == (1, 1.0)


def test_equal_marks_make_equal_files(tmp_path: Path) -> None:
    marks, _ = read_marks(*files(tmp_path))
    first, second = tmp_path / "1.npz", tmp_path / "2.npz"
    model, again = fit(marks)[0], fit(marks)[0]
    model.write(first)
    again.write(second)
    assert first.read_bytes() == second.read_bytes()
    read = Model.read(first)
    chosen = [[each.choose(mark.sentences) for mark in marks] for each in (model, read)]
    assert chosen[0] == chosen[1]
    assert read.certain == model.certain


def test_passages_of_another_edition_are_left_out(tmp_path: Path) -> None:
    assert read_marks(*files(tmp_path, 3, characters=7)) == ([], 3)
    assert read_marks(*files(tmp_path, 3, sentences=[[0, 1]])) == ([], 3)
    with raises(CareError, "too_few_questions", queries=0, limit=1):
        accuracy([])


@pytest.mark.parametrize("changed", [{"sentences": [1]}, {"query-id": "other"}])
def test_wrong_lines_are_errors(tmp_path: Path, changed: dict[str, Any]) -> None:
    paths = files(tmp_path, 3, **changed)
    with pytest.raises(CareError) as caught:
        read_marks(*paths)
    assert caught.value.fields["line"] == 1


def test_a_fit_needs_marks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus, queries, marks = map(str, files(tmp_path, 99))
    arguments = ["evidence", "--corpus", corpus, "--queries", queries, "--marks", marks]
    assert main([*arguments, "--out", str(tmp_path / "x.npz")]) == 1
    assert error_code(capsys.readouterr().err) == "too_few_questions"


def test_the_sentence_is_right_as_often_as_the_readme_of_the_sample_says(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = {"corpus": "corpus", "queries": "queries", "marks": "evidence"}
    paths = [part for n, f in names.items() for part in (f"--{n}", str(SAMPLE / f"{f}.jsonl"))]
    assert main(["evidence", *paths, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["marks"], found["left_out"]) == (116, 0)
    assert found["right"]["value"] >= 76 / 116  # 78
    assert found["right_of_shown"]["value"] >= 0.8  # 11 of 13
    assert main(["evidence", *paths]) == 0
    assert "right of those shown: 84.6%" in capsys.readouterr().out
