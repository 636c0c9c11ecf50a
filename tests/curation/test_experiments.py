from pathlib import Path

import numpy as np
import pytest

from models.curation import near_duplicates, scale, voting
from models.curation.diversity import RULES
from models.curation.voting import Errors, expected_precision, scripted_grade
from tests.conftest import write_jsonl
from tests.curation.conftest import DOCUMENTS, QUERIES

POSITIVE = "SA"


def rate(relevant: bool, errors: Errors, judge: str = "one") -> list[bool]:
    """Whether a judge errs, for many pairs."""
    grades = (scripted_grade(judge, relevant, errors, "q", str(i)) for i in range(20_000))
    return [(grade in POSITIVE) != relevant for grade in grades]


@pytest.mark.parametrize("shared", [0, 0.5])
@pytest.mark.parametrize("relevant", [True, False])
def test_scripted_judges_err_at_their_rates(relevant: bool, shared: float) -> None:
    errors = Errors(missed=0.2, invented=0.05, shared=shared)
    expected = 0.2 if relevant else 0.05
    one, two = (np.array(rate(relevant, errors, judge)) for judge in ("one", "two"))
    assert one.mean() == pytest.approx(expected, abs=0.01)
    both = (one & two).mean()
    alone = (expected - shared * expected) / (1 - shared * expected)
    assert both == pytest.approx(shared * expected + (1 - shared * expected) * alone**2, abs=0.005)


def test_expected_precision_by_hand() -> None:
    half = Errors(0.5, 0.1, 0)
    assert expected_precision(0.2, [half]) == pytest.approx(0.1 / (0.1 + 0.08))
    assert expected_precision(0.2, [half, half]) == pytest.approx(0.05 / (0.05 + 0.008))


def test_votes_from_end_to_end(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"_id": id_, "title": "问答", "text": text} for id_, text in DOCUMENTS.items()]
    write_jsonl(data / "corpus.jsonl", rows)
    asked = QUERIES | {"q3": "骨折以后多久能走路"}
    rows = [{"_id": id_, "text": text} for id_, text in asked.items()]
    write_jsonl(data / "test.queries.jsonl", rows)
    liar, honest = Errors(0, 1, 0), Errors(0, 0, 0)
    monkeypatch.setattr(voting, "SCENARIOS", {"one liar": (liar, honest, honest)})
    options = {"split": "test", "queries": 10, "depth": 5, "seed": 0}
    result = voting.measure_voting(data, tmp_path / "out", **options, pair="care-mini", threads=1)  # type: ignore[arg-type]
    one, two, three = result["scenarios"][0]["votes"]
    # All fifteen pairs are judged; three are relevant, none of the third question's.
    assert (one["pairs"], one["relevant"], one["positives"], one["precision"]) == (15, 3, 15, 0.2)
    assert (two["positives"], two["precision"], two["dropped"]) == (3, 1.0, 12)
    assert three["recall"] == 1.0
    assert one["expected_precision"] == pytest.approx(0.2)
    assert "one liar" in (tmp_path / "out" / "voting.md").read_text("utf-8")


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("高血压患者应当少盐", "高血压患者应当少盐", True),
        ("高血压患者应当少盐饮食", "高血压患者应当少油饮食", True),
        ("高血压患者应当少盐", "骨折以后要固定", False),
        # 4 of 10 trigrams are common.
        ("abcdefghi", "abcdefxyz", True),
        ("abcdefghij", "abcdefxyz", False),
    ],
)
def test_texts_are_alike_by_their_trigrams(first: str, second: str, expected: bool) -> None:
    sets = near_duplicates.trigrams(first), near_duplicates.trigrams(second)
    assert near_duplicates.alike(*sets) is expected
    assert (len(sets[0] & sets[1]) >= 0.4 * len(sets[0] | sets[1])) is expected


def test_the_filter_takes_duplicates_from_hard_negatives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subjects = (
        "高血压患者每天测量血压，少盐饮食，坚持服药",
        "骨折后固定受伤的肢体，尽快到医院拍片",
        "孩子发烧先物理降温，超过三十八度五再用药",
        "糖尿病要控制主食，定期检查血糖和眼底",
        "失眠时睡前不看手机，白天多做运动",
        "湿疹部位保持干燥，外用激素软膏",
    )
    texts = [subject + end for subject in subjects for end in ("", "。", "！", "。谢谢")]
    write_jsonl(
        tmp_path / "corpus.jsonl", [{"_id": f"d{i}", "text": t} for i, t in enumerate(texts)]
    )
    write_jsonl(tmp_path / "dev.queries.jsonl", [{"_id": "q", "text": "高血压要注意什么"}])
    (tmp_path / "dev.qrels.tsv").write_text("q\td0\t1\n", encoding="utf-8")
    monkeypatch.setattr(near_duplicates, "THRESHOLDS", (0.97,))
    monkeypatch.setattr(near_duplicates, "SEEDS", 1)
    result = near_duplicates.measure_diversity(
        tmp_path,
        tmp_path / "out",
        split="dev",
        queries=5,
        depth=6,
        seed=0,
        pair="care-mini",
        threads=1,
    )
    before, after = result["rows"]
    assert before["documents"] == len(texts) > after["documents"]
    assert before["near_duplicate_pairs"] > after["near_duplicate_pairs"]
    assert before["negatives"] == after["negatives"] == 6


def test_synthetic_vectors_and_their_figures(tmp_path: Path) -> None:
    vectors = scale.clustered_vectors(tmp_path / "v.npy", 400, 32, seed=0)
    cosines = vectors @ vectors.T - np.eye(400)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)
    near = cosines > 0.6
    assert 2 < near.sum(axis=1).mean() < 6
    assert cosines[near].mean() == pytest.approx(0.8, abs=0.03)
    report = scale.measure_scale(tmp_path / "out", 8_000, 32, RULES["documents"], threads=1)
    assert report["index"] == "Flat"
    assert 5000 < report["kept"] < 8_000
    assert not list((tmp_path / "out").glob("*.npy"))
    assert "8000" in (tmp_path / "out" / "scale.md").read_text("utf-8")
