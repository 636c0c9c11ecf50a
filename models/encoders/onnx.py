"""Encoders that ONNX Runtime runs; pooling and normalisation are in the graph."""

import importlib
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from tokenizers import Encoding as TokenEncoding
from tokenizers import Tokenizer

from core.errors import PairError
from core.files import sha256_file, writing_in
from core.text import with_prompt
from core.types import EncoderSpec, Encoding, FloatArray
from core.vectors import truncate_normalize
from models.encoders.providers import (
    ON_CPU,
    ProviderOptions,
    engine_folder,
    execution_providers,
    not_started,
    require_available,
    require_products,
    require_started,
    warm_up_shapes,
)
from models.encoders.tokens import text_offsets

OUTPUT = "sentence_embedding"
# The key in a graph's metadata of the checksum of its tensors, where they lie in a file beside it.
DATA_SHA256 = "data_sha256"

log = logging.getLogger(__name__)


class OnnxEncoder:
    """One side of a pair, from an ONNX file and a `tokenizer.json`.

    Args:
        spec: The facts of the encoder.
        folder: The folder that the spec's paths are relative to.
        threads: Threads that one call may use on the processor.
        provider: What the encoder runs on.

    Attributes:
        spec: The facts of the encoder.
        buckets: The shapes that batches are padded to, or None for no more than they need.
        concurrent_calls: Calls of `encode_tokens` that keep it at work.

    Raises:
        PairError: If a file is missing, is not the one that the spec describes, or does
            not load.
        ProviderError: If the provider is not installed, does not start or lacks an
            operator of the graph; nothing else takes its place.
    """

    concurrent_calls = 1

    def __init__(
        self,
        spec: EncoderSpec,
        folder: Path,
        threads: int,
        provider: ProviderOptions = ON_CPU,
    ) -> None:
        if spec.format != "onnx":
            raise PairError(f"{spec.model} has format '{spec.format}': it must be exported to ONNX")
        tokenizer = FileTokenizer(spec, folder)
        weights = _described(spec, folder / spec.weights, spec.weights_sha256)
        self.spec = spec
        self.buckets = provider.buckets(spec.max_length)
        self._provider = provider
        self._tokenizer = tokenizer
        self._session = _load_session(weights, threads, provider, spec)

    def warm_up(self) -> None:
        """Runs each shape that matters once, so that no request pays for a first time.

        TensorRT builds its engine while the encoder loads; both can take minutes.
        """
        self.tokenize(["warm-up"])
        for rows, length in warm_up_shapes(self._provider, self.spec.max_length):
            start = time.perf_counter()
            self._run(np.zeros((rows, length), np.int64), np.ones((rows, length), np.int64))
            seconds = time.perf_counter() - start
            log.info("warm-up: %d x %d tokens in %.3f s", rows, length, seconds)

    def tokenize(self, texts: Sequence[str]) -> list[TokenEncoding]:
        """Tokenizes texts behind the encoder's prompt, cut to the encoder's length."""
        return self._tokenizer(texts)

    def token_offsets(self, text: str) -> list[tuple[int, int]]:
        """Returns start and end of each token that stands for a text; see `text_offsets`."""
        return self._tokenizer.token_offsets(text)

    def encode_tokens(self, tokens: Sequence[TokenEncoding]) -> Encoding:
        """Encodes tokenized texts as one batch, padded to the longest of them or to a bucket.

        Args:
            tokens: At least one of what `tokenize` returned.
        """
        step = self.buckets.max_rows if self.buckets else len(tokens)
        batches = (tokens[first : first + step] for first in range(0, len(tokens), step))
        vectors = np.concatenate([self._encode_batch(batch) for batch in batches])
        return Encoding(
            vectors=truncate_normalize(vectors, self.spec.dimension),
            token_counts=np.array([len(t.ids) for t in tokens], dtype=np.int32),
            truncated=np.array([bool(t.overflowing) for t in tokens]),
        )

    def _encode_batch(self, tokens: Sequence[TokenEncoding]) -> FloatArray:
        shape = (len(tokens), max(len(t.ids) for t in tokens))
        if self.buckets:
            shape = self.buckets.fit(*shape)
        ids = np.zeros(shape, dtype=np.int64)
        mask = np.zeros_like(ids)
        for row, token in enumerate(tokens):
            ids[row, : len(token.ids)] = token.ids
            mask[row, : len(token.ids)] = 1
        # The mean over no token is no number.
        mask[len(tokens) :, 0] = 1
        return self._run(ids, mask)[: len(tokens)]

    def _run(self, ids: NDArray[np.int64], mask: NDArray[np.int64]) -> FloatArray:
        (vectors,) = self._session.run([OUTPUT], {"input_ids": ids, "attention_mask": mask})
        return np.asarray(vectors, dtype=np.float32)

    def encode(self, texts: Sequence[str]) -> Encoding:
        """Encodes texts as one batch.

        Args:
            texts: At least one text, already under the text rules of `core.text`.

        Returns:
            float32 vectors [n, dimension] of unit norm, with token counts.
        """
        return self.encode_tokens(self.tokenize(texts))


class FileTokenizer:
    """A spec's `tokenizer.json`, behind the prompt and within the length of the spec.

    Args:
        spec: The facts of the encoder.
        folder: The folder that the spec's paths are relative to.

    Raises:
        PairError: If the file is missing, is not the one that the spec describes, or does
            not load.
    """

    def __init__(self, spec: EncoderSpec, folder: Path) -> None:
        path = _described(spec, folder / spec.tokenizer, spec.tokenizer_sha256)
        try:
            self._tokenizer: Tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise PairError(f"{path} is not a readable tokenizer: {error}") from error
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(spec.max_length)
        # A user who types "</s>" means those letters.
        self._tokenizer.encode_special_tokens = True
        self._prompt = spec.prompt

    def __call__(self, texts: Sequence[str]) -> list[TokenEncoding]:
        """Tokenizes texts behind the prompt, cut to the encoder's length."""
        prompted = [with_prompt(self._prompt, text) for text in texts]
        return self._tokenizer.encode_batch_fast(prompted)

    def token_offsets(self, text: str) -> list[tuple[int, int]]:
        """Returns start and end of each token that stands for a text; see `text_offsets`."""
        return text_offsets(self._tokenizer, self._prompt, text)


def _described(spec: EncoderSpec, path: Path, checksum: str) -> Path:
    if not path.is_file():
        raise PairError(f"{path} is missing: it belongs to {spec.model}")
    if sha256_file(path) != checksum:
        raise PairError(f"{path} is not the file that the pair describes: its sha256 differs")
    return path


def _load_session(
    path: Path, threads: int, provider: ProviderOptions, spec: EncoderSpec
) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # Spinning threads take the processor from the search that runs beside the encoder.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if provider.name == "cpu":
        session = _start_session(path, options, provider, spec)
    else:
        session = _start_gpu_session(path, options, provider, spec)
    names = {i.name for i in session.get_inputs()} | {o.name for o in session.get_outputs()}
    missing = {"input_ids", "attention_mask", OUTPUT} - names
    if missing:
        raise PairError(f"{path} lacks the inputs or outputs {', '.join(sorted(missing))}")
    _check_data(path, session.get_modelmeta().custom_metadata_map.get(DATA_SHA256))
    return session


def _check_data(path: Path, checksum: str | None) -> None:
    """Checks the tensors beside a graph that is too large for one file; it has their checksum."""
    data = path.with_name(f"{path.name}.data")
    if checksum and sha256_file(data) != checksum:
        raise PairError(f"{data} is not the file that {path.name} describes: its sha256 differs")


def _start_gpu_session(
    path: Path, options: ort.SessionOptions, provider: ProviderOptions, spec: EncoderSpec
) -> ort.InferenceSession:
    require_available(provider, ort.get_available_providers(), ort.__version__)
    ort.preload_dlls()
    if provider.name == "tensorrt":
        with suppress(ImportError):
            # On import the package loads the libraries that it holds.
            importlib.import_module("tensorrt_libs")
        folder = engine_folder(provider, spec)
        with writing_in(folder):
            folder.mkdir(parents=True, exist_ok=True)
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    session = _start_session(path, options, provider, spec)
    require_started(provider, session.get_providers(), ort.__version__)
    placed = [
        (part.ep_name, node.op_type)
        for part in session.get_provider_graph_assignment_info()
        for node in part.get_nodes()
    ]
    require_products(provider, path, placed)
    return session


def _start_session(
    path: Path, options: ort.SessionOptions, provider: ProviderOptions, spec: EncoderSpec
) -> ort.InferenceSession:
    providers = execution_providers(provider, spec)
    try:
        # Without this a provider that fails is replaced, now or in the middle of a request.
        return ort.InferenceSession(str(path), options, providers=providers, enable_fallback=0)
    except Exception as error:  # onnxruntime's exceptions share no public base
        if provider.name != "cpu":
            raise not_started(provider, ort.__version__, str(error)) from error
        raise PairError(f"{path} is not a readable ONNX model: {error}") from error
