"""The indexes of a service, opened for writes with the document encoders of its pairs."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

from core.breaker import Breaker
from core.encoders import Encoder, EncoderSpec, Encoding, OffsetTokenizer, Pair
from core.errors import (
    CareError,
    EmbeddingServerError,
    EmbeddingSpaceError,
    ProviderError,
    TextRejectedError,
)
from core.manifest import IndexManifest
from core.retries import RetryPolicy
from indexer.live.index import LiveIndex
from indexer.publication import IndexWriter
from indexer.update import active_manifest
from models.encoders.factory import BACKENDS, DTYPES, EncoderOptions, document_encoder
from models.pairs import load_pair
from service.settings import Settings, plain
from stores.token_vectors import token_vector_spec

# How long the encoder may take for a batch; one on a processor takes seconds [s].
HANGS = 120.0
# Batches that are encoded at once.
_THREADS = 4
# A request of a writer is answered within seconds, or sent again.
_RETRIES = RetryPolicy(retries=1, backoff=0.5, longest_wait=5.0)


class LiveIndexes:
    """Opens indexes for writes. Each encoder is loaded once, at the first text that it encodes."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._encoders: dict[tuple[str, EncoderOptions], _LazyEncoder] = {}
        self._lock = Lock()

    def open(self, name: str) -> LiveIndex:
        """Opens an index.

        Raises:
            CareError: If it takes no writes; see `LiveIndex`.
            EmbeddingSpaceError: If no pair of the service has its embedding space.
        """
        index = IndexWriter(self._settings.indexes, name)
        return LiveIndex(index, self._encoder(active_manifest(index)))

    def _encoder(self, manifest: IndexManifest) -> "_LazyEncoder":
        space = manifest.encoder.embedding_space
        pair = next((p for p in self._pairs() if p.embedding_space == space), None)
        if pair is None:
            raise EmbeddingSpaceError(
                f"index '{manifest.name}' has the embedding space '{space}', which no pair of the "
                "service has: name one in CARE_OTHER_PAIRS",
                index=manifest.name,
                embedding_space=space,
            )
        options = EncoderOptions(
            backend=manifest.backend if manifest.backend in BACKENDS else "auto",
            dtype=manifest.dtype if manifest.dtype in DTYPES else "auto",
            token_vectors=token_vector_spec(manifest),
        )
        if url := plain(self._settings.document_url):
            model = self._settings.document_model or None
            options = EncoderOptions(
                backend="openai",
                base_url=url,
                model=model,
                timeout=self._settings.timeout_ms / 1000,
                retries=_RETRIES,
            )
        with self._lock:
            key = pair.name, options
            return self._encoders.setdefault(key, _LazyEncoder(pair, options))

    def _pairs(self) -> list[Pair]:
        names = (self._settings.pair, *self._settings.other_pairs)
        return [load_pair(name, self._settings.pairs) for name in names]


class _LazyEncoder:
    """A document encoder that is loaded when it is used; until it can be, each use fails.

    One that fails repeatedly, or does not return, is not waited for again by each use. Its users
    are threads of several indexes.
    """

    def __init__(self, pair: Pair, options: EncoderOptions) -> None:
        self.spec: EncoderSpec = pair.document
        self._pair, self._options = pair, options
        self._loaded: Encoder | None = None
        self._lock = Lock()
        self._breaker = Breaker("the document encoder")
        # A call that does not return keeps its thread.
        self._threads = ThreadPoolExecutor(_THREADS, "encode")

    def encode(self, texts: Sequence[str]) -> Encoding:
        failures = EmbeddingServerError, ProviderError
        with self._breaker.call(*failures, answers=(TextRejectedError,)):
            call = self._threads.submit(self._encoder().encode, texts)
            try:
                return call.result(HANGS)
            except TimeoutError as error:
                call.cancel()
                message = f"the encoder of {self.spec.model} did not return within {HANGS:.0f} s"
                raise ProviderError(message, code="encoder_hangs", seconds=HANGS) from error

    def token_offsets(self, text: str) -> Sequence[tuple[int, int]]:
        encoder = self._encoder()
        if not isinstance(encoder, OffsetTokenizer):
            message = f"the encoder of {self.spec.model} has no tokenizer"
            raise CareError(message, code="no_token_offsets")
        return encoder.token_offsets(text)

    def _encoder(self) -> Encoder:
        with self._lock:
            self._loaded = self._loaded or document_encoder(self._pair, self._options)
            return self._loaded
