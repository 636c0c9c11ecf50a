"""Batches that an encoder fails at: encoded without the texts that it fails at."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from core.errors import (
    CareError,
    EmbeddingServerError,
    ProviderError,
    TextRefusedError,
    VectorError,
)
from core.types import Encoding

# A process that ended, a server that refuses or goes on failing, a vector that is no number, as
# half precision makes of some texts. What else an encoder raises is a fault of its own.
FAILURES = (ProviderError, EmbeddingServerError, VectorError)

# A text that every encoder takes.
_PROBE = "care"
# Each costs the start of an engine, perhaps of minutes.
_MAX_IN_A_ROW = 16


@dataclass(slots=True)
class Isolated:
    """What became of a batch.

    Attributes:
        parts: Positions in the batch and what was encoded of them.
        refused: Reasons by position of the texts that cannot be encoded.
    """

    parts: list[tuple[list[int], Encoding]] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)


class Isolator:
    """Finds by halving the texts at which an encoder fails, and encodes the others.

    A text is refused if a server says so, or if the encoder failed at it alone, twice, and
    encodes another one right after: then the text is at fault and not the encoder.

    Args:
        encode: Encodes texts as one batch.
    """

    def __init__(self, encode: Callable[[Sequence[str]], Encoding]) -> None:
        self._encode = encode
        self._in_a_row = 0

    def works(self) -> None:
        """Notes that the encoder has encoded texts."""
        self._in_a_row = 0

    def encode(self, texts: Sequence[str], error: CareError) -> Isolated:
        """Encodes a batch that failed; as a whole, if the encoder only stumbled.

        Args:
            texts: The batch.
            error: How it failed.

        Raises:
            CareError: If the encoder fails at any text, or at 16 texts in a row.
        """
        found = Isolated()
        whole = list(range(len(texts)))
        if isinstance(error, TextRefusedError):
            found.refused[whole.pop(error.position)] = str(error)
            waiting = _halves(whole)
        else:
            waiting = [whole]
        failed_alone: set[int] = set()
        while waiting:
            positions = waiting.pop()
            try:
                encoding = self._encode([texts[i] for i in positions])
            except TextRefusedError as refusal:
                found.refused[positions.pop(refusal.position)] = str(refusal)
                waiting += _halves(positions)
            except FAILURES as failure:
                self._require_working(failure)
                if len(positions) > 1:
                    waiting += _halves(positions)
                elif positions[0] in failed_alone:
                    self._refuse(found, positions[0], failure)
                else:
                    failed_alone.add(positions[0])
                    waiting.append(positions)
            else:
                found.parts.append((positions, encoding))
                self.works()
        return found

    def _refuse(self, found: Isolated, position: int, failure: CareError) -> None:
        found.refused[position] = f"the encoder fails at this text: {failure}"
        self._in_a_row += 1
        if self._in_a_row == _MAX_IN_A_ROW:
            raise ProviderError(
                f"the encoder failed at {_MAX_IN_A_ROW} texts in a row, at last with: {failure}"
            ) from failure

    def _require_working(self, failure: CareError) -> None:
        try:
            self._encode([_PROBE])
        except FAILURES as error:
            raise type(failure)(f"the encoder fails at any text: {failure}") from error


def _halves(positions: list[int]) -> list[list[int]]:
    """Returns the two halves, the first one last, without empty ones."""
    middle = (len(positions) + 1) // 2
    return [half for half in (positions[middle:], positions[:middle]) if half]
