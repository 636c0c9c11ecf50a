"""Isolates texts for which an encoder fails, and excludes their documents from the index."""

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
    TextRejectedError,
    VectorError,
)
from indexer.staging import StagedCorpus, vector_of_row

# Errors that a single text can cause: a crashed process, a server that rejects the text or keeps
# failing, a vector with NaN, which half precision yields for some texts. Other exceptions are bugs.
ENCODING_ERRORS = (ProviderError, EmbeddingServerError, VectorError)

# A text that every encoder can encode.
_PROBE = "care"
# Each failure can restart an engine, which can take minutes.
_MAX_IN_A_ROW = 16


@dataclass(slots=True)
class IsolationResult:
    """Result of a failed batch."""

    # Positions in the batch that were encoded together, and their encoding.
    parts: list[tuple[list[int], Encoding]] = field(default_factory=list)
    # Reason for each position that cannot be encoded.
    failed: dict[int, str] = field(default_factory=dict)


class FailureIsolator:
    """Isolates the failing texts of a batch by bisection and encodes the others.

    A text counts as failed if a server rejects it, or if the encoder fails twice for a batch of
    this text alone but encodes another text directly afterwards.
    """

    def __init__(self, encode: Callable[[Sequence[str]], Encoding]) -> None:
        self._encode = encode
        self._in_a_row = 0

    def succeeded(self) -> None:
        """Resets the count of consecutive failures."""
        self._in_a_row = 0

    def encode(self, texts: Sequence[str], error: CareError) -> IsolationResult:
        """Encodes a batch that failed with `error`, first as a whole: the error may be transient.

        CareError if the encoder fails for every text, or for 16 texts in a row.
        """
        found = IsolationResult()
        whole = list(range(len(texts)))
        if isinstance(error, TextRejectedError):
            found.failed[whole.pop(error.position)] = str(error)
            pending = _halves(whole)
        else:
            pending = [whole]
        failed_alone: set[int] = set()
        while pending:
            positions = pending.pop()
            try:
                encoding = self._encode([texts[i] for i in positions])
            except TextRejectedError as rejection:
                found.failed[positions.pop(rejection.position)] = str(rejection)
                pending += _halves(positions)
            except ENCODING_ERRORS as failure:
                self._require_working(failure)
                if len(positions) > 1:
                    pending += _halves(positions)
                elif positions[0] in failed_alone:
                    self._give_up(found, positions[0], failure)
                else:
                    failed_alone.add(positions[0])
                    pending.append(positions)
            else:
                found.parts.append((positions, encoding))
                self.succeeded()
        return found

    def _give_up(self, found: IsolationResult, position: int, failure: CareError) -> None:
        found.failed[position] = f"the encoder fails for this text: {failure}"
        self._in_a_row += 1
        if self._in_a_row == _MAX_IN_A_ROW:
            raise ProviderError(
                f"the encoder failed for {_MAX_IN_A_ROW} texts in a row; the last error is: "
                f"{failure}",
                code="too_many_failures_in_a_row",
                count=_MAX_IN_A_ROW,
            ) from failure

    def _require_working(self, failure: CareError) -> None:
        try:
            self._encode([_PROBE])
        except ENCODING_ERRORS as error:
            raise type(failure)(
                f"the encoder fails for every text: {failure}", code="encoder_fails"
            ) from error


def _halves(positions: list[int]) -> list[list[int]]:
    """Returns the non-empty halves, the second one first."""
    middle = (len(positions) + 1) // 2
    return [half for half in (positions[middle:], positions[:middle]) if half]


def max_failed(staged: StagedCorpus, max_reject_rate: float, *, reuse: bool) -> int:
    """Returns how many documents may fail in addition to the records rejected by the first pass.

    `max_reject_rate` is the maximum share of records that may be rejected. With `reuse`, documents
    are not counted whose vectors are reused because they have not changed.
    """
    # The tolerance compensates rounding: 0.29 × 100 is less than 29 in float64.
    return int(max_reject_rate * _records(staged, reuse=reuse) + 1e-6) - staged.rejected


def failed_documents(
    folder: Path,
    staged: StagedCorpus,
    failed: Mapping[int, str],
    *,
    max_reject_rate: float,
    reuse: bool,
) -> tuple[NDArray[np.bool_] | None, dict[str, str]]:
    """Finds the documents with failed texts; if one chunk fails, its document is not indexed.

    `failed` are reasons by number of the text; for the other arguments see `max_failed`.

    Returns:
        bool [staged rows], which rows are indexed, or None for all; and the reasons by document id.

    Raises:
        CorpusError: If too many documents fail, or all of them.
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
        rejected = staged.rejected + len(reasons)
        total = _records(staged, reuse=reuse)
        message = (
            f"{rejected} of {total} records are rejected ({rejected / total:.1%}, allowed "
            f"{max_reject_rate:.1%}); the first that cannot be encoded is document '{id_}': "
            f"{reason}. Correct them, or allow more (--max-reject-rate)"
        )
        raise CorpusError(message, code="too_many_rejects", rejected=rejected, total=total, id=id_)
    if len(reasons) == staged.documents:
        message = f"no document can be encoded; the first is '{id_}': {reason}"
        raise CorpusError(message, code="nothing_encoded", id=id_)
    return keep, reasons


def _records(staged: StagedCorpus, *, reuse: bool) -> int:
    unchanged = staged.update.unchanged if staged.update and reuse else 0
    return staged.rejected + staged.documents - unchanged
