import unicodedata
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.analysis import terms

SPELLINGS = [
    ("CA125", "CA-125", "CA.125", "CA 125", "ｃａ－１２５", "CA‐125", "ca–125", "CA·125"),
    ("HbA1c", "HbA 1c", "HbA-1c"),
    ("维生素B12", "维生素B-12", "维生素B 12"),
    ("COVID19", "covid-19", "COVID 19"),
    ("PDL1", "PD-L1", "PD L1", "PD-1/PD-L1", "PD 1/PD L1", "anti-PD-L1"),
    ("CD20", "CD-20", "CD 20", "anti-CD20", "CD20-CD3", "CD20-50"),
    ("IL6升高", "IL-6升高", "IL 6升高"),
    ("5HT", "5-HT", "5 HT"),
    ("5HT1A", "5-HT1A", "5-HT 1A"),
    ("GLP1", "GLP-1", "GLP 1 RA"),
    ("SARSCoV2", "SARS-CoV-2", "SARS-CoV2"),
    ("CA19-9", "CA 19-9", "CA-19-9"),
    ("200mg", "200 mg", "200-mg", "200mg/日"),
    ("2-3mg", "2-3 mg", "2–3mg"),
    ("Hpylori", "H.pylori", "H-pylori"),
    ("v1.2", "v 1.2", "V-1.2"),
]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("高血压", {"高", "血", "压", "高血", "血压"}),
        ("肝", {"肝"}),
        ("HbA1c", {"hba1c", "_hba1c"}),
        ("ＨｂＡ１ｃ", {"hba1c", "_hba1c"}),
        ("5mg/kg", {"5mg/kg", "5mg", "_5mg", "5", "mg", "kg"}),
        ("5 mg/kg", {"5", "5_mg", "_5mg", "mg/kg", "mg", "kg"}),
        ("39.5℃", {"39.5", "c"}),
        ("13.5mmol/L", {"13.5mmol/l", "13.5mmol", "_13.5mmol", "13.5", "mmol", "l"}),
        ("β受体", {"β", "受", "体", "β受", "受体"}),
        ("COVID-19", {"covid-19", "_covid19", "covid", "19"}),
        ("H.pylori", {"h.pylori", "hpylori", "h", "pylori"}),
        ("1.CT检查", {"1.ct", "_1ct", "1", "ct", "检", "查", "检查"}),
        ("140/90", {"140/90", "140", "90"}),
        ("2020-01-31", {"2020-01-31", "2020", "01", "31"}),
        ("heart failure", {"heart", "failure"}),
        ("B12 500", {"b12", "_b12", "500"}),
        ("高，血", {"高", "血"}),
        ("，。！", set()),
        ("", set()),
    ],
)
def test_the_terms_of_a_text(text: str, expected: set[str]) -> None:
    assert set(terms(text)) == expected


def folded(text: str) -> str:
    """Returns a text without the differences of case, width and sign that no search makes."""
    signs = str.maketrans("‐–·", "--.")
    return unicodedata.normalize("NFKC", text).casefold().translate(signs)


@pytest.mark.parametrize("spellings", SPELLINGS)
def test_spellings_of_a_name_share_a_term_without_separators(spellings: Sequence[str]) -> None:
    shared = set.intersection(*(set(terms(text)) for text in spellings))
    assert {"hpylori"} <= shared or any(term.startswith("_") for term in shared)


@pytest.mark.parametrize("spellings", SPELLINGS)
def test_each_spelling_has_terms_that_others_lack(spellings: Sequence[str]) -> None:
    own = {frozenset(terms(text)) for text in spellings}
    assert len(own) == len(set(map(folded, spellings)))


@given(
    letters=st.from_regex("[A-Za-z]{1,9}", fullmatch=True),
    digits=st.from_regex(r"[0-9]{1,5}(\.[0-9]{1,2})?", fullmatch=True),
    letters_first=st.booleans(),
    separators=st.tuples(*[st.sampled_from(["", "-", ".", " ", "–", "－"])] * 2),
    contexts=st.tuples(*[st.sampled_from(["{}", "查{}。", "（{}）", "在 {} 后", "{}/L"])] * 2),
)
def test_letters_and_a_number_are_one_name_in_all_spellings(
    letters: str,
    digits: str,
    letters_first: bool,
    separators: tuple[str, str],
    contexts: tuple[str, str],
) -> None:
    parts = (letters, digits) if letters_first else (digits, letters)
    spellings = [separator.join(parts) for separator in separators]
    found = [terms(context.format(name)) for context, name in zip(contexts, spellings, strict=True)]
    assert "_" + "".join(parts).casefold() in set.intersection(*map(set, found))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("38.5", "385"),
        ("3-5", "35"),
        ("1:2", "12"),
        ("140/90", "14090"),
        ("2020-01-31", "20200131"),
        ("12 34", "1234"),
        ("v1.2", "v12"),
        ("3-5mg", "35mg"),
        ("0.5 mg", "05mg"),
        ("CA19-9", "CA199"),
        ("B1 2", "B12"),
        ("CA，125", "CA125"),
        ("CA\uff0f125", "CA125"),
        ("维生素B，12", "维生素B12"),
    ],
)
def test_other_numbers_and_names_have_no_name_in_common(first: str, second: str) -> None:
    shared = set(terms(first)) & set(terms(second))
    assert not any(term.startswith("_") for term in shared)
    assert not {second.casefold(), f"_{second.casefold()}"} & set(terms(first))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("CA-125", ["ca-125", "ca", "125"]),
        ("CA125", ["ca125"]),
        ("CA 125", ["ca", "125"]),
        ("CA–125", ["ca", "125"]),
        ("5mg/kg", ["5mg/kg", "5mg", "5", "mg", "kg"]),
        ("H.pylori", ["h.pylori"]),
    ],
)
def test_the_terms_of_indexes_of_older_releases(text: str, expected: list[str]) -> None:
    assert terms(text, names=False) == expected


def test_without_characters_words_have_bigrams_only() -> None:
    assert terms("高血压 肝", characters=False) == ["高血", "血压", "肝"]


def test_terms_are_repeated_as_in_the_text() -> None:
    assert terms("胃痛，胃痛").count("胃痛") == 2


@given(st.text() | st.text(alphabet="aB5.-/ +_，"))
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
