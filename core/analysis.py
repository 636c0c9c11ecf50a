"""Terms of a text for full-text search: Chinese characters and bigrams, Latin words, numbers.

The indexer and the service call the same function, so that documents and queries have the same
terms. Chinese has no spaces. Single characters find all matches, and bigrams rank those first that
have the same words. On medical questions both together find more than the words of a segmenter
(docs/evaluate.md).
"""

import re
import unicodedata

from core.text import normalize_text

# Han characters, and Greek letters, which medicine writes as a part of Chinese words (β受体).
_HAN = "\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffffα-ω"
_RUNS = re.compile(
    rf"(?P<han>[{_HAN}]+)|(?P<word>[^\W_{_HAN}]+(?:[./+-][^\W_{_HAN}]+)*)",
)
# A number and its unit (5mg), which are also written apart.
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)([^\W\d].*)")
_SEPARATORS = re.compile(r"[/+-]")
# Longer words are not words of a language, and take room in the index.
_MAX_CHARS = 64


def terms(text: str, *, characters: bool = True) -> list[str]:
    """Returns the terms of a text, in order and with repetitions.

    Letters are compared without case and in their compatibility form (Ｂ as b). A word or number
    with separators (5mg/kg, covid-19) is a term as a whole, and so are its parts: words, numbers
    and units.

    Args:
        text: The text.
        characters: Whether Chinese characters that are also part of a bigram are terms.

    Example:
        >>> terms("HbA1c 升高")
        ['hba1c', '升', '高', '升高']
    """
    found: list[str] = []
    for run in _RUNS.finditer(unicodedata.normalize("NFKC", normalize_text(text)).casefold()):
        if han := run["han"]:
            if characters or len(han) == 1:
                found += han
            found += (han[at : at + 2] for at in range(len(han) - 1))
        else:
            found += _terms_of_word(run["word"])
    return found


def _terms_of_word(word: str) -> list[str]:
    found = {word[:_MAX_CHARS]: None}
    for part in _SEPARATORS.split(word):
        found[part[:_MAX_CHARS]] = None
        if quantity := _QUANTITY.fullmatch(part):
            found |= dict.fromkeys(piece[:_MAX_CHARS] for piece in quantity.groups())
    return list(found)
