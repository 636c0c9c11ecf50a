"""Training data of the ablations, with and without diversification."""

from pathlib import Path

import pytest

from care.ablation_data import BOTH, NAMES, NONE, QUERIES, triples, write_training_data
from core.records import Triple
from tests.conftest import write_jsonl
from tests.curation.judges import lines
from training.data import in_part
from training.schema import Part

pytestmark = pytest.mark.train

TOPICS = ("高血压", "糖尿病", "胃炎", "颈椎病", "湿疹", "失眠", "贫血", "骨折")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Questions of which many have the same words, each with a document of its own."""
    from evaluation.beir import write_split

    folder = tmp_path / "data"
    folder.mkdir()
    asked = [
        f"{topic}患者第{number}次来问：平时吃什么好？" for topic in TOPICS for number in range(40)
    ]
    corpus = [
        {"_id": f"d{i}", "title": "", "text": f"{text}回答{i}：清淡饮食。"}
        for i, text in enumerate(asked)
    ]
    write_jsonl(folder / "corpus.jsonl", corpus)
    queries = {f"q{i}": text for i, text in enumerate(asked)}
    write_split(folder, "train", queries, {f"q{i}": {f"d{i}": 1} for i in range(len(asked))})
    return folder


def test_all_settings_have_equal_numbers_of_questions(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from curation.diversity import DiversityOptions

    monkeypatch.setattr("care.ablation_data._OPTIONS", DiversityOptions(seeds=8))
    out = tmp_path / "out" / "diversified"
    write_training_data(data, out)
    found = {name: lines(out / f"{name}.jsonl") for name in NAMES}
    asked = {name: [record["query"] for record in found[name]] for name in NAMES}
    pool = {record["text"] for record in lines(out / "queries-pool.jsonl")}
    assert 8 <= len(asked[NONE]) == len(asked[QUERIES]) < len(pool)
    # Diverse documents change the negatives alone.
    assert asked[QUERIES] == asked[BOTH] != asked[NONE]
    kept = {record["text"] for record in lines(out / "documents-kept.jsonl")}
    assert {text for record in found[BOTH] for text in record["negatives"]} <= kept
    assert {text for record in found[QUERIES] for text in record["negatives"]} - kept
    for record in found[NONE] + found[QUERIES] + found[BOTH]:
        assert not set(record["positives"]) & set(record["negatives"])
    # No question is of the fold that the ablations test.
    assert pool and not any(in_part(text, Part(folds=8, only=7)) for text in pool)
    # A folder that exists is kept.
    (out / f"{NONE}.jsonl").write_text("")
    write_training_data(data, out)
    assert (out / f"{NONE}.jsonl").read_text() == ""


def test_negatives_are_the_first_hits_that_are_not_relevant() -> None:
    documents = ["胃炎 饮食", "胃炎 饮食 胃炎 饮食", "骨折"]
    (record,) = triples([Triple("胃炎 饮食", (documents[1],))], documents)
    assert record["negatives"] == [documents[0]]
