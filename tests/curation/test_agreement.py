import pytest

from curation.agreement import agreement
from curation.judging import (
    Judgement,
)


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
