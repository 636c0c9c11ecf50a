"""Either side of a pair, whatever the format of its weights."""

import os

from core.types import Encoder, EncoderSpec, Pair
from models.encoders.onnx import OnnxEncoder


def load_encoder(pair: Pair, spec: EncoderSpec, *, threads: int = 0) -> Encoder:
    """Loads one side of a pair.

    Args:
        pair: The pair.
        spec: Its query or document side, or a copy of one with another prompt.
        threads: Threads of ONNX Runtime, 0 for all processors.

    Raises:
        PairError: If weights or tokenizer are missing or not what the spec says.
    """
    if spec.format == "onnx":
        return OnnxEncoder(spec, pair.folder, threads or len(os.sched_getaffinity(0)))
    from models.encoders.transformers import TransformersEncoder

    return TransformersEncoder(spec, pair.folder)
