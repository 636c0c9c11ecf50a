"""Texts that an encoder fails at: found by halving batches, and their documents left out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from core import documents
from core.documents import DocumentReader
from core.encoders import Encoding
from core.errors import (
    CareError,
    CorpusError,
    EmbeddingServerError,
    ProviderError,
    TextRefusedError,
    VectorError,
)
from indexer.staging import StagedCorpus, vector_of_row

# A process that ended, a server that refuses or goes on failing, a vector that is not a number, as
# half precision makes of some texts. What else an encoder raises is a fault of its own.
FAILURES = (ProviderError, EmbeddingServerError, VectorError)

# A text that every encoder takes.
_PROBE = "care"
# Each costs the start of an engine, perhaps of minutes.
_MAX_IN_A_ROW = 16


@dataclass(slots=True)
class Isolated:
    """What became of a batch: encoded parts, and reasons of what failed, by position in it."""

    parts: list[tuple[list[int], Encoding]] = field(default_factory=list)
    failed: dict[int, str] = field(default_factory=dict)


class Isolator:
    """Finds by halving the texts at which an encoder fails, and encodes the others.

    A text counts as failed if a server says so, or if the encoder failed at it alone, twice, and
    encodes another one right after: then the text is at fault and not the encoder.
    """

    def __init__(self, encode: Callable[[Sequence[str]], Encoding]) -> None:
        self._encode = encode
        self._in_a_row = 0

    def succeeded(self) -> None:
        """Notes that the encoder has encoded texts."""
        self._in_a_row = 0

    def encode(self, texts: Sequence[str], error: CareError) -> Isolated:
        """Encodes a batch that failed with `error`; as a whole, if that was transient.

        Raises:
            CareError: If the encoder fails at any text, or at 16 texts in a row.
        """
        found = Isolated()
        whole = list(range(len(texts)))
        if isinstance(error, TextRefusedError):
            found.failed[whole.pop(error.position)] = str(error)
            waiting = _halves(whole)
        else:
            waiting = [whole]
        failed_alone: set[int] = set()
        while waiting:
            positions = waiting.pop()
            try:
                encoding = self._encode([texts[i] for i in positions])
            except TextRefusedError as refusal:
                found.failed[positions.pop(refusal.position)] = str(refusal)
                waiting += _halves(positions)
            except FAILURES as failure:
                self._require_working(failure)
                if len(positions) > 1:
                    waiting += _halves(positions)
                elif positions[0] in failed_alone:
                    self._give_up(found, positions[0], failure)
                else:
                    failed_alone.add(positions[0])
                    waiting.append(positions)
            else:
                found.parts.append((positions, encoding))
                self.succeeded()
        return found

    def _give_up(self, found: Isolated, position: int, failure: CareError) -> None:
        found.failed[position] = f"the encoder fails at this text: {failure}"
        self._in_a_row += 1
        if self._in_a_row == _MAX_IN_A_ROW:
            raise ProviderError(
                f"the encoder failed at {_MAX_IN_A_ROW} texts in a row, the last time with: "
                f"{failure}",
                code="too_many_failures_in_a_row",
                count=_MAX_IN_A_ROW,
            ) from failure

    def _require_working(self, failure: CareError) -> None:
        try:
            self._encode([_PROBE])
        except FAILURES as error:
            raise type(failure)(
                f"the encoder fails at any text: {failure}", code="encoder_fails"
            ) from error


def _halves(positions: list[int]) -> list[list[int]]:
    """Returns the two halves, the first one last, without empty ones."""
    middle = (len(positions) + 1) // 2
    return [half for half in (positions[middle:], positions[:middle]) if half]


def max_failed(staged: StagedCorpus, max_reject_rate: float, *, reuse: bool) -> int:
    """Returns how many documents may be left out beside the records rejected by the first pass.

    With `reuse` documents that an update left unchanged are not encoded, and do not count.
    """
    # What 0.29 × 100 lacks to 29 is no document.
    return int(max_reject_rate * _records(staged, reuse=reuse) + 1e-6) - staged.rejected


def failed_documents(
    folder: Path,
    staged: StagedCorpus,
    failed: Mapping[int, str],
    *,
    max_reject_rate: float,
    reuse: bool,
) -> tuple[NDArray[np.bool_] | None, dict[str, str]]:
    """Finds the documents to leave out; if one chunk cannot be encoded, none is indexed.

    Why a text `failed` is said by its number; the other arguments are those of `max_failed`.

    Returns:
        bool [staged rows], which rows are indexed, or None for all; and why not, by document id.

    Raises:
        CorpusError: If too many documents are left out, or none is left.
    """
    if not failed:
        return None, {}
    reader = DocumentReader(folder / documents.FILE_NAME)
    vector_of = vector_of_row(folder)
    keep = np.ones(len(reader), dtype=np.bool_)
    reasons: dict[str, str] = {}
    for row in np.flatnonzero(np.isin(vector_of, list(failed))):
        document = reader[int(row)]
        reasons.setdefault(document.parent or document.id, failed[int(vector_of[row])])
        first = int(row) - document.chunk
        keep[first : first + document.chunks] = False
    id_, reason = next(iter(reasons.items()))
    if len(reasons) > max_failed(staged, max_reject_rate, reuse=reuse):
        left_out = staged.rejected + len(reasons)
        total = _records(staged, reuse=reuse)
        message = (
            f"{left_out} of {total} records are rejected ({left_out / total:.1%}, allowed "
            f"{max_reject_rate:.1%}); the first that cannot be encoded is document '{id_}': "
            f"{reason}"
        )
        raise CorpusError(message, code="too_many_rejects", rejected=left_out, total=total, id=id_)
    if len(reasons) == staged.documents:
        message = f"no document can be encoded; the first is '{id_}': {reason}"
        raise CorpusError(message, code="nothing_encoded", id=id_)
    return keep, reasons


def _records(staged: StagedCorpus, *, reuse: bool) -> int:
    unchanged = staged.update.unchanged if staged.update and reuse else 0
    return staged.rejected + staged.documents - unchanged
