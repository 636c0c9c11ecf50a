import numpy as np
import pytest

from service.fusion import NOTHING, fuse, merged
from stores.base import ScoredRows


def scored(**scores: float) -> ScoredRows:
    """Returns scores by row, such as r7=0.9, in descending order."""
    ordered = sorted(scores.items(), key=lambda item: -item[1])
    rows = [int(row[1:]) for row, _ in ordered]
    return np.array([s for _, s in ordered], np.float32), np.array(rows, np.int64)


DENSE = scored(r3=0.9, r1=0.8, r2=0.7, r9=0.6)
LEXICAL = scored(r2=0.5, r9=0.1)


def test_a_score_is_the_similarity_plus_the_weighted_lexical_score() -> None:
    found = fuse(DENSE, LEXICAL, {"lexical": 0.5})
    assert found.rows.tolist() == [2, 3, 1, 9]
    assert found.scores.tolist() == pytest.approx([0.95, 0.9, 0.8, 0.65])


def test_ranks_are_fused_by_their_weighted_reciprocals() -> None:
    found = fuse(DENSE, LEXICAL, {"lexical": 0.5, "rank_constant": 60})
    expected = {3: 1 / 61, 1: 1 / 62, 2: 1 / 63 + 0.5 / 61, 9: 1 / 64 + 0.5 / 62}
    assert found.rows.tolist() == sorted(expected, key=lambda row: -expected[row])
    assert found.scores.tolist() == pytest.approx(sorted(expected.values(), reverse=True))


def test_without_lexical_rows_the_order_is_that_of_the_vectors() -> None:
    found = fuse(DENSE, NOTHING, {"lexical": 0.5})
    assert found.rows.tolist() == [3, 1, 2, 9]
    assert found.scores.tolist() == DENSE[0].tolist()


def test_equal_scores_are_ordered_by_row() -> None:
    found = fuse(scored(r5=0.5, r2=0.5, r7=0.5), NOTHING, {})
    assert found.rows.tolist() == [2, 5, 7]


def test_each_channel_explains_its_part() -> None:
    found = fuse(DENSE, LEXICAL, {"lexical": 0.5})
    assert found.explain(9) == {
        "dense": {"rank": 4, "score": pytest.approx(0.6), "weight": 1.0},
        "lexical": {"rank": 2, "score": pytest.approx(0.1), "weight": 0.5},
    }
    assert found.explain(3)["lexical"] == {"rank": None, "score": None, "weight": 0.5}


def test_lexical_rows_without_a_similarity_do_not_count() -> None:
    found = fuse(DENSE, scored(r8=0.9, r2=0.5), {"lexical": 0.5})
    assert found.rows.tolist() == [2, 3, 1, 9]
    assert found.explain(2)["lexical"]["rank"] == 2


def test_lists_are_merged_in_the_order_of_scores() -> None:
    scores, rows = merged(scored(r3=0.9, r1=0.2), scored(r2=0.5))
    assert rows.tolist() == [3, 2, 1]
    assert scores.tolist() == pytest.approx([0.9, 0.5, 0.2])
