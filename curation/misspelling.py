"""Errors of typing and of speech recognition: characters that sound alike, left out, doubled.

A Chinese input method offers the characters of a syllable, so a wrong one sounds like the right
one. Where speakers do not distinguish sounds, as n and l or in and ing, its syllable differs too.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from functools import cache

from curation.rewording import Reworded

# The common characters of GB 2312, "level 1".
_COMMON = [
    bytes([0xA0 + row, 0xA0 + cell]).decode("gb2312")
    for row in range(16, 56)
    for cell in range(1, 95 if row < 55 else 90)
]
# Sounds that many speakers do not distinguish.
_MERGED = (("zh", "z"), ("ch", "c"), ("sh", "s"), ("ing", "in"), ("eng", "en"), ("ang", "an"))
_INITIALS = {"l": "n", "f": "h", "r": "l"}
# Share of the errors of each kind; the rest are characters of the same syllable.
_MERGED_SHARE, _OMITTED_SHARE, _DOUBLED_SHARE = 0.25, 0.12, 0.05
_ATTEMPTS = 20


def misspell(
    queries: Mapping[str, str], *, errors: int = 1, versions: int = 1, seed: int = 0
) -> Iterator[Reworded]:
    """Yields queries with up to `errors` wrong characters, given their texts by id.

    The id of version n of a query is `ID-en`, from 1. A query without Chinese characters is left
    out. Random choices follow from `seed`; those of a query depend on its id alone.
    """
    for id_, text in queries.items():
        rng = random.Random(f"{seed} {id_}")
        made: dict[str, None] = {}
        for _ in range(_ATTEMPTS):
            if len(made) == versions:
                break
            wrong = with_errors(text, rng.randint(1, errors), rng)
            if wrong != text:
                made[wrong] = None
        for number, wrong in enumerate(made, start=1):
            yield Reworded(f"{id_}-e{number}", wrong, id_)


def with_errors(text: str, count: int, rng: random.Random) -> str:
    """Returns a text with `count` wrong characters, fewer if it has fewer Chinese characters."""
    characters = list(text)
    places = [place for place, character in enumerate(text) if character in _syllables()]
    for place in rng.sample(places, min(count, len(places))):
        characters[place] = _wrong(text[place], rng)
    return "".join(characters)


def _wrong(character: str, rng: random.Random) -> str:
    kind = rng.random()
    if kind < _OMITTED_SHARE:
        return ""
    if kind < _OMITTED_SHARE + _DOUBLED_SHARE:
        return character * 2
    syllable = _syllables()[character]
    merged = kind < _OMITTED_SHARE + _DOUBLED_SHARE + _MERGED_SHARE
    same = _same_sound(_merged)[_merged(syllable)] if merged else _same_sound(str)[syllable]
    others = [other for other in same if other != character]
    return rng.choice(others) if others else character


@cache
def _syllables() -> dict[str, str]:
    """Returns the syllable of each common character, without tone."""
    from pypinyin import lazy_pinyin

    return {character: lazy_pinyin(character)[0] for character in _COMMON}


@cache
def _same_sound(sound: Callable[[str], str]) -> dict[str, list[str]]:
    """Returns the common characters by the sound of their syllables."""
    groups: dict[str, list[str]] = {}
    for character, syllable in _syllables().items():
        groups.setdefault(sound(syllable), []).append(character)
    return groups


def _merged(syllable: str) -> str:
    for sound, other in _MERGED[:3]:
        if syllable.startswith(sound):
            syllable = other + syllable[len(sound) :]
    for sound, other in _MERGED[3:]:
        if syllable.endswith(sound):
            syllable = syllable[: -len(sound)] + other
    return _INITIALS.get(syllable[0], syllable[0]) + syllable[1:]
