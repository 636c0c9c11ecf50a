"""A deterministic encoder for tests that do not need a model."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, get_args

import numpy as np

from core.encoders import EncoderSpec, Encoding, LateInteraction, Pair, Role
from core.types import FloatArray
from core.vectors import truncate_normalize
from models.late_interaction import encode_tokens, pool_tokens

DIMENSION = 64
_MAX_CHARS = 200


def make_spec(role: Role = "query", space: str = "bigrams-1") -> EncoderSpec:
    return EncoderSpec(
        model="bigrams",
        revision="1",
        weights="none",
        weights_sha256="0" * 64,
        tokenizer="none",
        tokenizer_sha256="0" * 64,
        role=role,
        dimension=DIMENSION,
        native_dimension=DIMENSION,
        max_length=_MAX_CHARS,
        pooling="mean",
        normalize=True,
        prompt="",
        embedding_space=space,
    )


def make_pair(**changes: Any) -> Pair:
    """Returns a pair of test encoders, whose weights are no files."""
    facts = {"name": "bigrams", "description": "d", "folder": Path()}
    return Pair(**facts | {role: make_spec(role) for role in get_args(Role)} | changes)


class BigramEncoder:
    """Hashes characters and bigrams, so that texts with common words have similar vectors.

    Args:
        role: Role of the encoder.
        space: Embedding space, which seeds the hash.
        claims: A false embedding space for the spec.
    """

    def __init__(self, role: Role = "query", space: str = "bigrams-1", claims: str = "") -> None:
        self.spec = make_spec(role, claims or space)
        self._seed = space.encode()[:16]
        self.texts_seen = 0

    def encode(self, texts: Sequence[str]) -> Encoding:
        return self.encode_tokens(texts)

    def tokenize(self, texts: Sequence[str]) -> Sequence[str]:
        return [text[:_MAX_CHARS] for text in texts]

    def token_offsets(self, text: str) -> Sequence[tuple[int, int]]:
        return [(at, at + 1) for at in range(len(text))]

    def encode_tokens(self, tokens: Sequence[str]) -> Encoding:
        self.texts_seen += len(tokens)
        return Encoding(
            vectors=truncate_normalize(np.stack([self._vector(t) for t in tokens]), DIMENSION),
            token_counts=np.array([min(len(t), _MAX_CHARS) for t in tokens], dtype=np.int32),
            truncated=np.array([len(t) > _MAX_CHARS for t in tokens]),
        )

    def _vector(self, text: str) -> FloatArray:
        return _vector_of(text[:_MAX_CHARS], self._seed)


@lru_cache(maxsize=1 << 14)
def _vector_of(text: str, seed: bytes) -> FloatArray:
    vector = np.full(DIMENSION, 1e-3, dtype=np.float32)
    for size in (1, 2):
        for start in range(len(text) - size + 1):
            gram = text[start : start + size].encode()
            digest = hashlib.blake2b(gram, key=seed, digest_size=8).digest()
            vector[digest[0] % DIMENSION] += 1.0 if digest[1] % 2 else -1.0
    vector.flags.writeable = False
    return vector


LATE_INTERACTION = LateInteraction(
    space="characters-1", dimension=16, pooling=2, codec="int8", weight=1.0
)


class TokenBigramEncoder(BigramEncoder):
    """Also has a token vector for each character; equal characters have equal vectors."""

    token_dimension = LATE_INTERACTION.dimension

    def encode_tokens(self, tokens: Sequence[str]) -> Encoding:
        encoding = super().encode_tokens(tokens)
        if self.spec.role == "query":
            return encoding
        pooled = (pool_tokens(token_vectors(t), LATE_INTERACTION.pooling) for t in tokens)
        stored = [encode_tokens(vectors, LATE_INTERACTION.codec) for vectors in pooled]
        return replace(encoding, token_vectors=stored)

    def encode_token_vectors(self, tokens: Sequence[str]) -> tuple[Encoding, list[FloatArray]]:
        return super().encode_tokens(tokens), [token_vectors(text) for text in tokens]


def token_vectors(text: str) -> FloatArray:
    """Returns a vector of unit norm for each character, float32 [characters, 16]."""
    rows = [_vector_of_character(character) for character in text[:_MAX_CHARS]]
    return truncate_normalize(np.array(rows, dtype=np.float32), LATE_INTERACTION.dimension)


@lru_cache(maxsize=1 << 14)
def _vector_of_character(character: str) -> FloatArray:
    drawn = np.random.default_rng(ord(character)).standard_normal(LATE_INTERACTION.dimension)
    return drawn.astype(np.float32)
