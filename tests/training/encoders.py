"""Encoders for training tests, and their comparison with encoders at serving."""

from pathlib import Path

import numpy as np

from models.encoders.transformers import TransformersEncoder
from tests.checkpoints import MAX_LENGTH
from training.encoder import Encoder, EncoderCheckpoint, encode, tokenize
from training.init import prepare
from training.schema import EncoderInit


def checkpoint_of(folder: Path, out: Path, **changes: object) -> EncoderCheckpoint:
    facts = {"start": str(folder), "max_length": MAX_LENGTH} | changes
    return prepare(EncoderInit.model_validate(facts), "query", out)


def check_parity(checkpoint: EncoderCheckpoint, texts: tuple[str, ...]) -> Encoder:
    encoder = Encoder(checkpoint, trainable=False)
    prompt = "头痛："
    vectors = encode(encoder, tokenize(checkpoint, prompt, texts), batch=3)
    served = TransformersEncoder(
        checkpoint.spec("query", "tiny", prompt=prompt), Path(), device="cpu"
    ).encode(texts)
    np.testing.assert_allclose(vectors, served.vectors, atol=2e-6)
    assert vectors.shape == (len(texts), checkpoint.dimension)
    return encoder
