"""Lists of the words that patients write and the clinical terms that they mean.

A list is a TSV file in UTF-8: the word, a tab, and one or several terms, separated by commas.
Lines that are empty or start with "#" are skipped.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

from core.errors import DataError
from core.records import read_small_text, record_error
from core.text import normalize_text

# The list that the project ships.
EVERYDAY_TERMS = Path(__file__).with_name("everyday_terms.tsv")

MAX_ROWS = 20_000
MAX_CHARS = 64
MAX_TERMS = 8

_COMMA = re.compile("[,，]")


def term_list(name: str | Path) -> "TermList":
    """Returns the list `everyday` that the project ships, an empty one for `none`, or a file's.

    Raises:
        DataError: If the file cannot be read or is invalid.
    """
    return TermList({}) if str(name) == "none" else TermList.read(term_list_path(name))


def term_list_path(name: str | Path) -> Path:
    """Returns the file of a list by its name or path; DataError if there is none."""
    path = EVERYDAY_TERMS if str(name) == "everyday" else Path(name)
    if not path.exists():
        reason = "is neither a file nor the name of a list: everyday or none"
        raise DataError.at(path, reason, "unreadable")
    return path


@dataclass(frozen=True)
class TermList:
    """Words of patients and the clinical terms that they mean."""

    # Terms by word; words are normalised and case-folded, terms are normalised.
    terms: Mapping[str, tuple[str, ...]]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads and checks a list.

        Raises:
            DataError: If the file cannot be read or is not UTF-8, a line has not two columns, an
                entry is empty or has more than `MAX_CHARS` characters, a word has more than
                `MAX_TERMS` terms or occurs in an earlier line with other terms, or the list has
                more than `MAX_ROWS` rows.
        """
        terms: dict[str, tuple[str, ...]] = {}
        rows = 0
        for number, line in enumerate(read_small_text(path).split("\n"), start=1):
            if not line.strip() or line.startswith("#"):
                continue
            rows += 1
            if rows > MAX_ROWS:
                raise _error(path, number, f"is row {rows:,}: a list has at most {MAX_ROWS:,}")
            word, meant = _row(path, number, line)
            if terms.setdefault(word, meant) != meant:
                raise _error(path, number, f"gives '{word}' other terms than an earlier line")
        return cls(terms)

    def for_documents(self, texts: Iterable[str], ratio: float = 0.1) -> Self:
        """Returns the list without the words that documents use as patients do.

        A word stays if at most `ratio` times as many of the texts contain it as contain one of its
        terms. Without this rule the list costs BM25 nDCG@10 on questions whose words the documents
        share. Words that are their own term stay. The texts can be a sample.
        """
        meant = {term for terms in self.terms.values() for term in terms}
        counts = _document_counts({*self.terms, *map(_fold, meant)}, texts)
        return type(self)(
            {
                word: terms
                for word, terms in self.terms.items()
                if terms == (word,)
                or counts[word] <= ratio * max(counts[_fold(term)] for term in terms)
            }
        )

    def split(self, text: str) -> list[tuple[str, ...]]:
        """Returns the parts of a text, folded: its words with their terms, and what is between.

        Words are found from left to right, the longest first, and do not overlap. A word that
        starts or ends with a Latin letter or a digit is not found inside a longer run of these. The
        time is linear in the length of the text.
        """
        folded = _fold(text)
        parts: list[tuple[str, ...]] = []
        at = start = 0
        while at < len(folded):
            word = self._word_at(folded, at)
            if word:
                parts += [(folded[start:at],), (word, *self.terms[word])]
                start = at + len(word)
            at += len(word) or 1
        return [part for part in [*parts, (folded[start:],)] if part[0]]

    def matches(self, text: str) -> list[str]:
        """Returns the terms of the words in a text, in the order of the text, without repetition.

        Terms that the text has already are omitted, so a word that is its own term only keeps
        shorter words in it from being found.
        """
        folded = _fold(text)
        found = dict.fromkeys(term for part in self.split(text) for term in part[1:])
        return [term for term in found if _fold(term) not in folded]

    def expand(self, text: str) -> str:
        """Returns the text followed by the terms of its words, separated by spaces."""
        return " ".join([text, *self.matches(text)])

    def as_tsv(self) -> str:
        """Returns the content of a file that `read` reads, in the order of the words."""
        rows = sorted(self.terms.items())
        return "".join(f"{word}\t{','.join(terms)}\n" for word, terms in rows)

    @cached_property
    def _lengths(self) -> dict[str, list[int]]:
        return _lengths(self.terms)

    def _word_at(self, text: str, at: int) -> str:
        for length in self._lengths.get(text[at], ()):
            word = text[at : at + length]
            if word in self.terms and not _is_inside(text, at, at + length):
                return word
        return ""


def _lengths(words: Iterable[str]) -> dict[str, list[int]]:
    """Returns the lengths of words by their first character, descending."""
    lengths: dict[str, set[int]] = {}
    for word in words:
        lengths.setdefault(word[0], set()).add(len(word))
    return {first: sorted(found, reverse=True) for first, found in lengths.items()}


def _document_counts(words: Collection[str], texts: Iterable[str]) -> Counter[str]:
    lengths = _lengths(words)
    counts: Counter[str] = Counter()
    for text in map(_fold, texts):
        counts.update(
            {
                text[at : at + length]
                for at, first in enumerate(text)
                for length in lengths.get(first, ())
                if text[at : at + length] in words and not _is_inside(text, at, at + length)
            }
        )
    return counts


def _row(path: Path, number: int, line: str) -> tuple[str, tuple[str, ...]]:
    columns = line.split("\t")
    if len(columns) != 2:
        reason = f"has {len(columns)} columns instead of 2: write a word, a tab and its terms"
        raise _error(path, number, reason)
    word = _fold(columns[0])
    meant = tuple(dict.fromkeys(map(normalize_text, _COMMA.split(columns[1]))))
    if not word or not all(meant):
        raise _error(path, number, "has an empty word or term")
    if max(map(len, (word, *meant))) > MAX_CHARS:
        raise _error(path, number, f"has a word or term of more than {MAX_CHARS} characters")
    if len(meant) > MAX_TERMS:
        raise _error(path, number, f"has more than {MAX_TERMS} terms")
    return word, meant


def _error(path: Path, number: int, reason: str) -> DataError:
    return record_error(path, number, reason, code="bad_term_list")


def _fold(text: str) -> str:
    return normalize_text(normalize_text(text).casefold())


def _is_inside(text: str, start: int, end: int) -> bool:
    """Whether a run of Latin letters and digits goes on before `start` or after `end`."""
    return any(
        0 < at < len(text) and all(c.isascii() and c.isalnum() for c in text[at - 1 : at + 1])
        for at in (start, end)
    )
