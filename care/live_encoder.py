"""The document encoder of indexes that are open for writes."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

import numpy as np

from core.breaker import Breaker
from core.encoders import Encoder, EncoderSpec, Encoding, OffsetTokenizer, Pair
from core.errors import CareError, EmbeddingServerError, ProviderError, TextRejectedError
from core.machine import available_cpus
from models.encoders.factory import EncoderOptions, document_encoder

# How long the encoder may take for a batch; one on a processor takes seconds [s].
HANGS = 120.0
# Batches that are encoded at once.
_BATCHES = 4


class LazyEncoder:
    """A document encoder that is loaded when it is used; until it can be, each use fails.

    One that fails repeatedly, or does not return, is not waited for again by each use. Its users
    are threads of several indexes. If each call takes one thread, texts are divided among calls for
    all processors, so that a single document leaves a processor to searches.
    """

    def __init__(self, pair: Pair, options: EncoderOptions) -> None:
        self.spec: EncoderSpec = pair.document
        self._pair, self._options = pair, options
        self._calls = available_cpus() if options.threads == 1 else 1
        self._loaded: Encoder | None = None
        self._lock = Lock()
        self._breaker = Breaker("the document encoder")
        # A call that does not return keeps its thread.
        self._threads = ThreadPoolExecutor(_BATCHES * self._calls, "encode")

    def encode(self, texts: Sequence[str]) -> Encoding:
        """Encodes texts; see `Encoder.encode`."""
        failures = EmbeddingServerError, ProviderError
        with self._breaker.call(*failures, answers=(TextRejectedError,)):
            encoder, count = self._encoder(), max(1, min(self._calls, len(texts)))
            calls = [self._threads.submit(encoder.encode, texts[i::count]) for i in range(count)]
            until = time.monotonic() + HANGS
            try:
                parts = [call.result(until - time.monotonic()) for call in calls]
            except TimeoutError as error:
                for call in calls:
                    call.cancel()
                message = f"the encoder of {self.spec.model} did not return within {HANGS:.0f} s"
                raise ProviderError(message, code="encoder_hangs", seconds=HANGS) from error
        return parts[0] if count == 1 else _in_turn(parts, len(texts))

    def token_offsets(self, text: str) -> Sequence[tuple[int, int]]:
        """Returns the places of the tokens of a text; see `OffsetTokenizer`."""
        encoder = self._encoder()
        if not isinstance(encoder, OffsetTokenizer):
            message = f"the encoder of {self.spec.model} has no tokenizer"
            raise CareError(message, code="no_token_offsets")
        return encoder.token_offsets(text)

    def _encoder(self) -> Encoder:
        with self._lock:
            self._loaded = self._loaded or document_encoder(self._pair, self._options)
            return self._loaded


def _in_turn(parts: Sequence[Encoding], count: int) -> Encoding:
    """Returns the encoding of a number of texts that were dealt out to `parts` in turn."""
    order = np.argsort(np.arange(count) % len(parts), kind="stable")
    places = np.argsort(order)
    tokens = [vectors for part in parts for vectors in part.token_vectors or ()]
    return Encoding(
        np.concatenate([part.vectors for part in parts])[places],
        np.concatenate([part.token_counts for part in parts])[places],
        np.concatenate([part.truncated for part in parts])[places],
        [tokens[place] for place in places.tolist()] if tokens else None,
    )
