"""Either side of a pair, whatever the format of its weights."""

import os
from pathlib import Path

from core.errors import ProviderError
from core.types import Encoder, EncoderSpec
from models.encoders.onnx import OnnxEncoder


def load_encoder(spec: EncoderSpec, folder: Path, threads: int = 0) -> Encoder:
    """Returns one side of a pair, by ONNX Runtime or transformers.

    Args:
        spec: The facts of the encoder.
        folder: The folder that the spec's paths are relative to.
        threads: Threads of ONNX Runtime, 0 for all processors.

    Raises:
        PairError: If its files are missing or do not fit the spec.
        ProviderError: If what it runs on is not installed.
    """
    if spec.format == "onnx":
        return OnnxEncoder(spec, folder, threads or len(os.sched_getaffinity(0)))
    try:
        from models.encoders.transformers import TransformersEncoder
    except ModuleNotFoundError as error:
        raise ProviderError(
            f"{error.name} is not installed: pip install torch transformers"
        ) from error
    return TransformersEncoder(spec, folder)
