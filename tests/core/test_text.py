import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from core.text import document_text, first_sentence, normalize_text

# With lone surrogates, which JSON can contain.
ANY_TEXT = st.text(st.characters())
# Combining marks that compose and reorder, white space with decompositions, invisible characters.
TANGLED = st.text(
    st.sampled_from("aeA가ᄀ\u0301\u0323\u0327\u200b\u200d\u00ad\u2000\u3000 \n\x85é")
)
TEXT = ANY_TEXT | TANGLED


@given(TEXT)
def test_normalisation_is_idempotent(text: str) -> None:
    once = normalize_text(text)
    assert normalize_text(once) == once


@given(TEXT)
@example("\ud800")
@example("\ufeff血\u200b压\x00")
def test_invisible_characters_are_removed(text: str) -> None:
    assert not {unicodedata.category(c) for c in normalize_text(text)} & {"Cc", "Cf", "Cs"}


@given(TEXT)
def test_white_space_is_collapsed_and_stripped(text: str) -> None:
    normal = normalize_text(text)
    assert normal == " ".join(normal.split())


@given(TEXT, st.sampled_from(["NFC", "NFD"]))
def test_canonical_equivalents_normalise_equally(text: str, form: str) -> None:
    assert normalize_text(unicodedata.normalize(form, text)) == normalize_text(text)


@given(TEXT)
def test_a_normalised_text_can_be_encoded_as_utf8(text: str) -> None:
    assert normalize_text(text).encode().decode() == normalize_text(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("高血压　患者\t\n护理", "高血压 患者 护理"),
        ("  血\u200b压 \ufeff", "血压"),
        ("a\x00b\x1fc", "ab c"),
        ("维生素Ｂ１２ 5㎎", "维生素Ｂ１２ 5㎎"),
        ("e\u0301", "é"),
        ("\ud83d", ""),
        ("", ""),
    ],
)
def test_examples_of_normalised_texts(text: str, expected: str) -> None:
    assert normalize_text(text) == expected


@given(TEXT, TEXT)
def test_a_document_text_is_normalised_title_then_text(title: str, text: str) -> None:
    lines = [line for line in (normalize_text(title), normalize_text(text)) if line]
    assert document_text(title, text).split("\n") == (lines or [""])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("一。二。", "一。"),
        ("一？", "一？"),
        ("一", "一"),
        ("一\n二！三", "一\n二！"),
        ("3.5 mg；二", "3.5 mg；"),
    ],
)
def test_examples_of_first_sentences(text: str, sentence: str) -> None:
    assert first_sentence(text) == sentence
