import numpy as np
import pytest

from search.fusion import NOTHING, RankedList, fuse, without
from stores.base import ScoredRows


def scored(**scores: float) -> ScoredRows:
    """Returns scores by row, such as r7=0.9, in descending order."""
    ordered = sorted(scores.items(), key=lambda item: -item[1])
    rows = [int(row[1:]) for row, _ in ordered]
    return np.array([s for _, s in ordered], np.float32), np.array(rows, np.int64)


DENSE = scored(r3=0.9, r1=0.8, r2=0.7, r9=0.6)
LEXICAL = scored(r2=0.5, r9=0.1)


def fused(lexical: ScoredRows, fusion: dict[str, float]) -> dict[int, float]:
    """The fused score of each row of `DENSE`, in its order."""
    scores, rows = fuse(DENSE, lexical, fusion)
    return dict(zip(rows.tolist(), scores.tolist(), strict=True))


def test_a_score_is_the_similarity_plus_the_weighted_lexical_score() -> None:
    expected = {3: 0.9, 1: 0.8, 2: 0.95, 9: 0.65}
    assert fused(LEXICAL, {"lexical": 0.5}) == pytest.approx(expected)


def test_ranks_are_fused_by_their_weighted_reciprocals() -> None:
    expected = {3: 1 / 61, 1: 1 / 62, 2: 1 / 63 + 0.5 / 61, 9: 1 / 64 + 0.5 / 62}
    assert fused(LEXICAL, {"lexical": 0.5, "rank_constant": 60}) == pytest.approx(expected)


def test_without_lexical_rows_the_scores_are_those_of_the_vectors() -> None:
    assert fused(NOTHING, {"lexical": 0.5}) == dict(
        zip(DENSE[1].tolist(), DENSE[0].tolist(), strict=True)
    )


def test_lexical_rows_without_a_similarity_do_not_count() -> None:
    expected = {3: 0.9, 1: 0.8, 2: 0.95, 9: 0.6}
    assert fused(scored(r8=0.9, r2=0.5), {"lexical": 0.5}) == pytest.approx(expected)


def test_each_channel_explains_its_part() -> None:
    found = RankedList(*DENSE, channels={"dense": (DENSE, 1.0), "lexical": (LEXICAL, 0.5)})
    assert found.explain(9) == {
        "dense": {"rank": 4, "score": pytest.approx(0.6), "weight": 1.0},
        "lexical": {"rank": 2, "score": pytest.approx(0.1), "weight": 0.5},
    }
    assert found.explain(3)["lexical"] == {"rank": None, "score": None, "weight": 0.5}


@pytest.mark.parametrize(
    ("rows", "others", "left"),
    [([5, 1, 9], [9, 5], [1]), ([5, 1], [], [5, 1]), ([], [3], []), ([7, 2], [1, 8], [7, 2])],
)
def test_rows_without_others(rows: list[int], others: list[int], left: list[int]) -> None:
    found = without(np.array(rows, np.int64), np.array(others, np.int64))
    assert found.tolist() == left
