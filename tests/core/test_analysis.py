import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.analysis import terms


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("高血压", {"高", "血", "压", "高血", "血压"}),
        ("肝", {"肝"}),
        ("HbA1c", {"hba1c"}),
        ("ＨｂＡ１ｃ", {"hba1c"}),
        ("5mg/kg", {"5mg/kg", "5mg", "5", "mg", "kg"}),
        ("39.5℃", {"39.5", "c"}),
        ("13.5mmol/L", {"13.5mmol/l", "13.5mmol", "13.5", "mmol", "l"}),
        ("β受体", {"β", "受", "体", "β受", "受体"}),
        ("COVID-19", {"covid-19", "covid", "19"}),
        ("140/90", {"140/90", "140", "90"}),
        ("高，血", {"高", "血"}),
        ("，。！", set()),
        ("", set()),
    ],
)
def test_the_terms_of_a_text(text: str, expected: set[str]) -> None:
    assert set(terms(text)) == expected


def test_without_characters_words_have_bigrams_only() -> None:
    assert terms("高血压 肝", characters=False) == ["高血", "血压", "肝"]


def test_terms_are_repeated_as_in_the_text() -> None:
    assert terms("胃痛，胃痛").count("胃痛") == 2


@given(st.text())
def test_terms_are_short_and_have_no_white_space(text: str) -> None:
    for term in terms(text):
        assert 0 < len(term) <= 64
        assert term.split() == [term]


@given(st.text())
def test_letters_are_compared_without_case(text: str) -> None:
    assert terms(text) == terms(text.casefold()) or text.casefold() != text


@given(st.text(alphabet="高血压aB5.-/ β，"))
def test_a_text_has_all_terms_of_its_words(text: str) -> None:
    assert set(terms(text, characters=False)) <= set(terms(text))
