"""Terms of a text for full-text search: Chinese characters and bigrams, Latin words, numbers.

The indexer and the service call the same function, so that documents and queries have the same
terms. Chinese has no spaces. Single characters find all matches, and bigrams rank those first that
have the same words. On medical questions both together find more than the words of a segmenter
(docs/evaluate.md).
"""

import re
import unicodedata
from collections.abc import Iterable
from itertools import pairwise
from operator import add

from core.text import normalize_text

# Han characters, and Greek letters, which medicine writes as a part of Chinese words (β受体).
_HAN = "\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffffα-ω"
_RUNS = re.compile(
    rf"(?P<han>[{_HAN}]+)|(?P<word>[^\W_{_HAN}]+(?:[./+-][^\W_{_HAN}]+)*)",
)
# A number and its unit (5mg), which are also written apart.
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)([^\W\d].*)")
_SEPARATORS = re.compile(r"[/+-]")
# Signs that are also written for a hyphen or a point.
_SIGNS = str.maketrans({**dict.fromkeys("\u2010\u2012\u2013\u2212", "-"), "\u00b7": "."})
# Between names (5mg/kg), inside a name, and between all parts. A point or hyphen between two digits
# is no separator of a name: 38.5 is not 385.
_BETWEEN_NAMES = re.compile("[/+]")
_IN_NAME = re.compile(r"(?<!\d)[ .-]|[ .-](?!\d)")
_BETWEEN_PARTS = re.compile(rf"{_SEPARATORS.pattern}|{_IN_NAME.pattern}")
_LETTER_AND_DIGIT = re.compile(r"\d[^\W\d]|[^\W\d]\d")
# Longer words are not words of a language, and take room in the index.
_MAX_CHARS = 64


def terms(text: str, *, characters: bool = True, names: bool = True) -> list[str]:
    """Returns the terms of a text, in order and with repetitions.

    Letters are compared without case and in their compatibility form (Ｂ as b). A word or number
    with separators (5mg/kg, covid-19) is a term as a whole, and so are its parts: words, numbers
    and units. A name of letters and digits is also a term without its separators, marked by "_".
    So CA125, CA-125, CA.125 and CA 125 find each other, and the spelling of the query has more
    terms in common with it than the others.

    Args:
        characters: Whether Chinese characters that are also part of a bigram are terms.
        names: Whether the terms are also those that all spellings of a name have in common.

    Example:
        >>> terms("CA-125 升高")
        ['ca-125', 'ca', '125', '_ca125', '升', '高', '升高']
    """
    found: list[str] = []
    folded = unicodedata.normalize("NFKC", normalize_text(text)).casefold()
    if names:
        folded = folded.translate(_SIGNS)
    before, end = "", 0
    for run in _RUNS.finditer(folded):
        if han := run["han"]:
            if characters or len(han) == 1:
                found += han
            found += map(add, han, han[1:])
        else:
            word = run["word"]
            if names and folded[end : run.start()] == " ":
                found += _terms_across(before, word)
            found += _terms_of_word(word, names=names)
            before, end = word, run.end()
    return found


def _terms_of_word(word: str, *, names: bool) -> list[str]:
    found, parts = [word], (_BETWEEN_PARTS if names else _SEPARATORS).split(word)
    for part in parts:
        found.append(part)
        if quantity := _QUANTITY.fullmatch(part):
            found += quantity.groups()
    if names:
        for name in _BETWEEN_NAMES.split(word):
            # Two parts of a compound can be a name: anti-PD-L1.
            pairs = map("".join, pairwise(_IN_NAME.split(name)))
            found += [name, *map(_joined, (name, *pairs))]
        found += map(_joined, parts)
    return _shortened(found)


def _terms_across(before: str, word: str) -> list[str]:
    """Returns the terms of a name that is written as two words: as it is spelled, and joined."""
    first, second = _BETWEEN_NAMES.split(before)[-1], _BETWEEN_NAMES.split(word)[0]
    joined = _joined(f"{first} {second}")
    is_name = joined.startswith("_") and " " not in joined
    return _shortened([f"{first}_{second}", joined]) if is_name else []


def _joined(name: str) -> str:
    joined = _IN_NAME.sub("", name)
    return f"_{joined}" if _LETTER_AND_DIGIT.search(joined) else joined


def _shortened(found: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(term[:_MAX_CHARS] for term in found))
