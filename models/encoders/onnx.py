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

from core.encoders import EncoderSpec, Encoding
from core.errors import PairError
from core.files import writing_in
from core.types import FloatArray
from models.encoders import providers
from models.encoders.providers import ON_CPU, ProviderOptions
from models.encoders.tokenizer import (
    TokenEncoder,
    Tokens,
    as_encoding,
    described_file,
    file_tokenizer,
    pad,
)

OUTPUT = "sentence_embedding"
# The key in a graph's metadata of the checksum of its tensors, where they lie in a file beside it.
DATA_SHA256 = "data_sha256"

log = logging.getLogger(__name__)


class OnnxEncoder(TokenEncoder):
    """One side of a pair, from an ONNX file and a `tokenizer.json`.

    The spec's paths are relative to `folder`; one call may use `threads` of the processor.

    Attributes:
        buckets: The shapes that batches are padded to, or None for no more than they need.

    Raises:
        PairError: If a file is missing, does not load or is not the one that the spec describes.
        ProviderError: If the provider is not installed, does not start or lacks an
            operator of the graph; nothing else takes its place.
    """

    def __init__(
        self, spec: EncoderSpec, folder: Path, threads: int, provider: ProviderOptions = ON_CPU
    ) -> None:
        if spec.format != "onnx":
            message = f"{spec.model} has format '{spec.format}': export it to ONNX"
            raise PairError(message, code="not_onnx", format=spec.format)
        self.tokenize = file_tokenizer(spec, folder)
        weights = described_file(spec, folder / spec.weights, spec.weights_sha256)
        self.spec = spec
        self.buckets = provider.buckets(spec.max_length)
        self._provider = provider
        self._session = _load_session(weights, threads, provider, spec)

    def warm_up(self) -> None:
        """Runs each shape that matters once, so that no request pays for a first time.

        TensorRT builds its engine while the encoder loads; both can take minutes.
        """
        self.tokenize(["warm-up"])
        for rows, length in providers.warm_up_shapes(self._provider, self.spec.max_length):
            start = time.perf_counter()
            self.run(np.zeros((rows, length), np.int64), np.ones((rows, length), np.int64))
            seconds = time.perf_counter() - start
            log.info("warm-up: %d x %d tokens in %.3f s", rows, length, seconds)

    def encode_tokens(self, tokens: Sequence[Tokens]) -> Encoding:
        """Encodes what `tokenize` returned as one batch, padded to its longest or to a bucket."""
        step = self.buckets.rows[-1] if self.buckets else len(tokens)
        batches = (tokens[first : first + step] for first in range(0, len(tokens), step))
        vectors = np.concatenate([self._encode_batch(batch) for batch in batches])
        return as_encoding(self.spec, vectors, tokens)

    def _encode_batch(self, tokens: Sequence[Tokens]) -> FloatArray:
        shape = (len(tokens), max(map(len, tokens)))
        ids, mask = pad(tokens, self.buckets.fit(*shape) if self.buckets else shape)
        # The mean over no token is no number.
        mask[len(tokens) :, 0] = 1
        return self.run(ids, mask)[: len(tokens)]

    def run(self, ids: NDArray[np.int64], mask: NDArray[np.int64]) -> FloatArray:
        """Returns what the graph does, float32 [n, dimension], for ids and mask [n, length].

        The mask is 1 for a token, 0 for padding on the right.
        """
        (vectors,) = self._session.run([OUTPUT], {"input_ids": ids, "attention_mask": mask})
        return np.asarray(vectors, dtype=np.float32)


def _load_session(
    path: Path, threads: int, provider: ProviderOptions, spec: EncoderSpec
) -> ort.InferenceSession:
    on_gpu = provider.name != "cpu"
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # Spinning threads take the processor from the search that runs beside the encoder.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if on_gpu:
        _prepare_gpu(provider, spec)
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    asked = providers.execution_providers(provider, spec)
    try:
        # Without the last a provider that fails is replaced, now or in the middle of a request.
        session = ort.InferenceSession(str(path), options, providers=asked, enable_fallback=0)
    except Exception as error:  # onnxruntime's exceptions share no public base
        if on_gpu:
            raise providers.not_started(provider, ort.__version__, str(error)) from error
        raise PairError.at(path, f"is not a readable ONNX model: {error}", "bad_graph") from error
    if on_gpu:
        _check_placement(session, path, provider)
    names = {i.name for i in session.get_inputs()} | {o.name for o in session.get_outputs()}
    missing = {"input_ids", "attention_mask", OUTPUT} - names
    if missing:
        reason = f"lacks the inputs or outputs {', '.join(sorted(missing))}"
        raise PairError.at(path, reason, "bad_graph")
    # Tensors of a graph that is too large for one file lie beside it.
    if checksum := session.get_modelmeta().custom_metadata_map.get(DATA_SHA256):
        described_file(spec, path.with_name(f"{path.name}.data"), checksum)
    return session


def _prepare_gpu(provider: ProviderOptions, spec: EncoderSpec) -> None:
    providers.check_available(provider, ort.get_available_providers(), ort.__version__)
    ort.preload_dlls()
    if provider.name == "tensorrt":
        with suppress(ImportError):
            # On import the package loads the libraries that it holds.
            importlib.import_module("tensorrt_libs")
        folder = providers.engine_folder(provider, spec)
        with writing_in(folder):
            folder.mkdir(parents=True, exist_ok=True)


def _check_placement(session: ort.InferenceSession, path: Path, provider: ProviderOptions) -> None:
    if provider.title not in session.get_providers():
        raise providers.not_started(provider, ort.__version__)
    parts = session.get_provider_graph_assignment_info()
    placed = [(part.ep_name, node.op_type) for part in parts for node in part.get_nodes()]
    providers.check_products(provider, path, placed)
