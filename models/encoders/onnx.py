"""Encoders in ONNX Runtime; the graph includes pooling and normalisation."""

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
    file_tokenizer,
    make_encoding,
    pad,
    verified_file,
)

OUTPUT = "sentence_embedding"
# Metadata key of the checksum of external tensors, for graphs that are too large for one file.
DATA_SHA256 = "data_sha256"

log = logging.getLogger(__name__)


class OnnxEncoder(TokenEncoder):
    """An encoder from an ONNX file and a `tokenizer.json`.

    Args:
        spec: Specification of the encoder.
        folder: Folder to which paths in the specification are relative.
        threads: Threads per call.
        provider: Execution provider; there is no fallback to another one.

    Attributes:
        buckets: Shapes to which batches are padded, or None to pad to the longest text.

    Raises:
        PairError: If a file is missing, does not load, or does not match its checksum.
        ProviderError: If the provider is not installed, does not start, or does not support an
            operator of the graph.
    """

    def __init__(
        self, spec: EncoderSpec, folder: Path, threads: int, provider: ProviderOptions = ON_CPU
    ) -> None:
        if spec.format != "onnx":
            message = f"{spec.model} has format '{spec.format}': export it to ONNX"
            raise PairError(message, code="not_onnx", format=spec.format)
        self.tokenize = file_tokenizer(spec, folder)
        weights = verified_file(spec, folder / spec.weights, spec.weights_sha256)
        self.spec = spec
        self.buckets = provider.buckets(spec.max_length)
        self._provider = provider
        self._session = _load_session(weights, threads, provider, spec)

    def warm_up(self) -> None:
        """Runs the encoder once for each relevant shape, so that first requests are not slower.

        On a GPU this can take minutes, as can loading the encoder, when TensorRT builds its engine.
        """
        self.tokenize(["warm-up"])
        for rows, length in providers.warm_up_shapes(self._provider, self.spec.max_length):
            start = time.perf_counter()
            self.run(np.zeros((rows, length), np.int64), np.ones((rows, length), np.int64))
            seconds = time.perf_counter() - start
            log.info("warm-up: %d x %d tokens in %.3f s", rows, length, seconds)

    def encode_tokens(self, tokens: Sequence[Tokens]) -> Encoding:
        """Encodes texts that `tokenize` returned; splits batches that exceed the largest bucket."""
        step = self.buckets.rows[-1] if self.buckets else len(tokens)
        batches = (tokens[first : first + step] for first in range(0, len(tokens), step))
        vectors = np.concatenate([self._encode_batch(batch) for batch in batches])
        return make_encoding(self.spec, vectors, tokens)

    def _encode_batch(self, tokens: Sequence[Tokens]) -> FloatArray:
        shape = (len(tokens), max(map(len, tokens)))
        ids, mask = pad(tokens, self.buckets.fit(*shape) if self.buckets else shape)
        # One token per padding row, because the mean of zero tokens is NaN.
        mask[len(tokens) :, 0] = 1
        return self.run(ids, mask)[: len(tokens)]

    def run(self, ids: NDArray[np.int64], mask: NDArray[np.int64]) -> FloatArray:
        """Runs the graph.

        Args:
            ids: int64 [n, length], token ids.
            mask: int64 [n, length], 1 for tokens and 0 for padding on the right.

        Returns:
            float32 [n, dimension].
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
    # Spinning threads would slow down searches that run at the same time.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if on_gpu:
        _prepare_gpu(provider, spec)
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    execution_providers = providers.execution_providers(provider, spec)
    try:
        # Disable the fallback, which replaces a failing provider even during a request.
        session = ort.InferenceSession(
            str(path), options, providers=execution_providers, enable_fallback=0
        )
    except Exception as error:  # the exceptions of onnxruntime have no public base class
        if on_gpu:
            raise providers.start_error(provider, ort.__version__, str(error)) from error
        raise PairError.at(path, f"is not a readable ONNX model: {error}", "bad_graph") from error
    if on_gpu:
        _check_placement(session, path, provider)
    names = {i.name for i in session.get_inputs()} | {o.name for o in session.get_outputs()}
    missing = {"input_ids", "attention_mask", OUTPUT} - names
    if missing:
        reason = (
            f"does not have the inputs or outputs {', '.join(sorted(missing))}: export it again"
        )
        raise PairError.at(path, reason, "bad_graph")
    # Verify external tensors, which the checksum of the graph does not cover.
    if checksum := session.get_modelmeta().custom_metadata_map.get(DATA_SHA256):
        verified_file(spec, path.with_name(f"{path.name}.data"), checksum)
    return session


def _prepare_gpu(provider: ProviderOptions, spec: EncoderSpec) -> None:
    providers.check_available(provider, ort.get_available_providers(), ort.__version__)
    ort.preload_dlls()
    if provider.name == "tensorrt":
        with suppress(ImportError):
            # The import loads the libraries of TensorRT.
            importlib.import_module("tensorrt_libs")
        folder = providers.engine_folder(provider, spec)
        with writing_in(folder):
            folder.mkdir(parents=True, exist_ok=True)


def _check_placement(session: ort.InferenceSession, path: Path, provider: ProviderOptions) -> None:
    if provider.onnx_name not in session.get_providers():
        raise providers.start_error(provider, ort.__version__)
    parts = session.get_provider_graph_assignment_info()
    placed = [(part.ep_name, node.op_type) for part in parts for node in part.get_nodes()]
    providers.check_matrix_products(provider, path, placed)
