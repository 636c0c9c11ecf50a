"""The report of ablations: table and orderings."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from training.experiments.ablation_report import (
    CARE,
    MAP,
    NDCG,
    ORDER,
    ORDERINGS,
    compare,
    describe,
    verdict,
    write_report,
)

# The report needs scipy and matplotlib, which are installed with torch.
pytestmark = pytest.mark.train

FACTS = {
    "questions": 4,
    "documents": 9,
    "candidates": 3,
    "stages": 5,
    "stage_minutes": 0.1,
    "processor": "a processor",
    "gpu": "",
    "threads": 1,
    "python": "3.11",
    "libraries": {"torch": "2"},
}


def known(**values: list[list[float]]) -> dict[str, dict[int, dict[str, list[float]]]]:
    """Returns scores by recipe from nDCG@10 of each seed's questions; MAP@10 is half of it."""
    return {
        name.replace("_", "-"): {
            seed: {NDCG: found, MAP: [value / 2 for value in found]}
            for seed, found in enumerate(seeds)
        }
        for name, seeds in values.items()
    }


def test_table_of_known_scores() -> None:
    scores = known(care=[[0.5] * 4, [0.7] * 4], kale=[[0.1] * 4])
    lines = describe(["care", "kale"], {"care": "CARE", "kale": "KALE"}, scores, {}, FACTS)
    rows = lines.splitlines()
    # The standard deviation of 50 and 70 is 10 · √2.
    assert rows[2] == "| CARE | 2 | 60.0 ± 14.1 | 30.0 ± 7.1 |"
    assert rows[3] == "| KALE | 1 | 10.0 | 5.0 |"
    assert re.findall(r"\d+", rows[5])[:3] == ["4", "9", "3"]


def test_orderings_are_decided_by_their_confidence_intervals() -> None:
    question = np.arange(40) / 100
    scores = known(
        care=[(question + 0.2).tolist(), (question + 0.3).tolist()],
        kale=[(question + 0.1).tolist(), (question + 0.1).tolist()],
        hotelmatch=[(question + 0.5).tolist()],
        without_mse=[(question + 0.2 + 0.1 * (-1) ** np.arange(40)).tolist()],
        symmetric_large=[(question + 0.4).tolist()],
    )
    compared = compare(scores)
    assert set(compared) == {(CARE, "kale"), (CARE, "hotelmatch"), (CARE, "without-mse")}
    assert compared[CARE, "kale"][NDCG].value == pytest.approx(0.15)
    # The two recipes share only one seed.
    assert compared[CARE, "hotelmatch"][MAP].value == pytest.approx(-0.15)
    said = [verdict(compared[CARE, n][NDCG]) for n in ("kale", "hotelmatch", "without-mse")]
    assert said == ["holds", "does not hold", "is undecided"]
    text = describe(list(scores), {}, scores, compared, FACTS)
    found = [line for line in text.splitlines() if line.startswith("- ")]
    # The difference and its interval in percent, and the number of shared seeds.
    assert re.findall(r"[-+][\d.]+", found[0])[:3] == ["+15.0"] * 3
    assert re.findall(r"[-+][\d.]+", found[1])[0] == "-30.0"
    assert [line.rstrip(".")[-1] for line in found[:3]] == ["2", "1", "1"]
    # (0.195 + 0.25) / (0.195 + 0.4)
    assert "75 %" in text.splitlines()[-3]


def test_every_recipe_of_the_table_is_in_an_ordering() -> None:
    assert {name for pair in ORDERINGS for name in pair} == set(ORDER)


def test_report_is_written(tmp_path: Path) -> None:
    scores = known(care=[[0.5] * 4] * 2, kale=[[0.1] * 4] * 2)
    write_report(tmp_path, {"care": "CARE"}, scores, FACTS)
    summary = json.loads((tmp_path / "scores.json").read_text())
    assert summary["scores"]["kale"][MAP] == {"0": 0.05, "1": 0.05}
    assert summary["orderings"][0]["verdict"] == "holds"
    assert (tmp_path / "scores.png").read_bytes().startswith(b"\x89PNG")
