"""Token vectors of an index version, for reranking by late interaction.

The files are in the folder `tokens` of the version and are memory-mapped; row i of the version is
row i here. They are independent of the store of the vectors.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from core.encoders import TokenVectorSpec
from core.errors import IndexVersionError
from core.files import sha256_file
from core.manifest import TOKENS, Component, FileRecord, IndexManifest
from core.rows import Rows, RowsWriter
from core.types import FloatArray, RowArray
from models.late_interaction import bytes_per_token, decode_tokens, max_sim_of_rows

FORMAT = 1
_NAME = "vectors"


def write_token_vectors(
    folder: Path, rows: Iterable[NDArray[np.uint8]], spec: TokenVectorSpec
) -> Component:
    """Writes the token vectors of a version to `folder`/tokens; returns its entry for the manifest.

    `rows` are the token vectors of each row, uint8 [tokens, bytes], as the encoder returned them.
    """
    target = folder / TOKENS
    target.mkdir()
    with RowsWriter(target, _NAME) as writer:
        for row in rows:
            writer.append(row.tobytes())
    files = {
        f"{TOKENS}/{path.name}": FileRecord(bytes=path.stat().st_size, sha256=sha256_file(path))
        for path in sorted(target.iterdir())
    }
    return token_component(spec, files)


def token_component(spec: TokenVectorSpec, files: Mapping[str, FileRecord]) -> Component:
    """Returns the entry for the manifest of token vectors."""
    return Component(format=FORMAT, files=dict(files), settings=spec.model_dump())


def token_vector_spec(manifest: IndexManifest) -> TokenVectorSpec | None:
    """Returns what the token vectors of a version are; None if it has none."""
    component = manifest.components.get(TOKENS)
    return TokenVectorSpec(**component.settings) if component else None


def open_token_vectors(
    folder: Path, component: Component | None, count: int
) -> "TokenVectors | None":
    """Opens the token vectors of a version of `count` rows; None if it has no such component.

    Raises:
        IndexVersionError: If the files cannot be read, or do not have a row for each document.
    """
    if component is None:
        return None
    source = folder / TOKENS
    if component.format != FORMAT:
        reason = f"have format {component.format} instead of {FORMAT}: build the index again"
        raise IndexVersionError.at(source, reason, "unreadable_token_vectors")
    spec = TokenVectorSpec(**component.settings)
    try:
        rows = Rows.open(source, _NAME, np.uint8)
    except (OSError, ValueError) as error:
        reason = "have no readable files: build the index again"
        raise IndexVersionError.at(source, reason, "unreadable_token_vectors") from error
    if len(rows) != count or rows.offsets[-1] != len(rows.values):
        reason = f"have {len(rows)} rows instead of {count}: build the index again"
        raise IndexVersionError.at(source, reason, "unreadable_token_vectors")
    return TokenVectors(rows, spec)


class TokenRows(Protocol):
    """Where token vectors are read: the methods of `core.rows.Rows` for that."""

    def __getitem__(self, row: int) -> NDArray[np.uint8]: ...

    def take(self, rows: RowArray) -> tuple[NDArray[np.uint8], RowArray]: ...


class TokenVectors:
    """The token vectors of one version, with what the manifest says of them; thread-safe."""

    def __init__(self, rows: TokenRows, spec: TokenVectorSpec) -> None:
        self._rows = rows
        self._width = bytes_per_token(spec.dimension, spec.codec)
        self.spec = spec

    def row(self, row: int) -> NDArray[np.uint8]:
        """Returns the stored token vectors of a row, uint8 [tokens, bytes]."""
        return self._rows[row].reshape(-1, self._width)

    def scores(self, query: FloatArray, rows: RowArray) -> FloatArray:
        """Returns the MaxSim of rows with a query.

        Args:
            query: Token vectors of the query, float32 [tokens, dimension] of unit norm.
            rows: int64 [n].

        Returns:
            float32 [n], from -1 to 1.
        """
        if not len(rows):
            return np.empty(0, np.float32)
        values, lengths = self._rows.take(rows)
        documents = decode_tokens(values.reshape(-1, self._width), self.spec.codec)
        return max_sim_of_rows(query, documents, lengths // self._width)
