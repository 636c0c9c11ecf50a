"""Encoders in ONNX Runtime; the graph includes pooling and normalisation.

A graph can have a second output, the token vectors for late interaction, which is computed on
request only.
"""

import importlib
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from core.encoders import EncoderSpec, Encoding, TokenVectorSpec
from core.errors import PairError
from core.files import writing_in
from core.types import FloatArray
from models import late_interaction
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

OUTPUT, TOKEN_OUTPUT = "sentence_embedding", "token_embeddings"
# Metadata key of the checksum of external tensors, for graphs that are too large for one file.
DATA_SHA256 = "data_sha256"

log = logging.getLogger(__name__)


class OnnxEncoder(TokenEncoder):
    """An encoder from an ONNX file and a `tokenizer.json`.

    Args:
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
        # Without this option, ONNX Runtime computes outputs that nobody asked for.
        self._run_options = ort.RunOptions()
        self._run_options.only_execute_path_to_fetches = True

    @property
    def token_dimension(self) -> int:
        """Dimensions of the token vectors, 0 if the graph has none."""
        shapes = {output.name: output.shape for output in self._session.get_outputs()}
        return int(shapes.get(TOKEN_OUTPUT, [0])[-1])

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
        batches = self._batches(tokens)
        vectors = [self.run(ids, mask)[: len(batch)] for batch, ids, mask in batches]
        return make_encoding(self.spec, np.concatenate(vectors), tokens)

    def encode_token_vectors(self, tokens: Sequence[Tokens]) -> tuple[Encoding, list[FloatArray]]:
        """Encodes as `encode_tokens`, and returns the token vectors of the same pass.

        Returns:
            The encoding, and for each text float32 [tokens, `token_dimension`] of unit norm,
            with the vectors of the prompt and of special tokens.
        """
        if not self.token_dimension:
            message = f"{self.spec.model} has no output {TOKEN_OUTPUT}: add it with "
            message += "care late-interaction export"
            raise PairError(message, code="no_token_output", model=self.spec.model)
        vectors, token_vectors = [], []
        for batch, ids, mask in self._batches(tokens):
            found, states = self._run([OUTPUT, TOKEN_OUTPUT], ids, mask)
            vectors.append(found[: len(batch)])
            token_vectors += [states[row, : len(text)].copy() for row, text in enumerate(batch)]
        return make_encoding(self.spec, np.concatenate(vectors), tokens), token_vectors

    def _batches(
        self, tokens: Sequence[Tokens]
    ) -> Iterator[tuple[Sequence[Tokens], NDArray[np.int64], NDArray[np.int64]]]:
        """Yields batches of texts that fit the buckets, with their padded ids and masks."""
        step = self.buckets.rows[-1] if self.buckets else len(tokens)
        for first in range(0, len(tokens), step):
            batch = tokens[first : first + step]
            shape = (len(batch), max(map(len, batch)))
            ids, mask = pad(batch, self.buckets.fit(*shape) if self.buckets else shape)
            # One token per padding row, because the mean of zero tokens is NaN.
            mask[len(batch) :, 0] = 1
            yield batch, ids, mask

    def run(self, ids: NDArray[np.int64], mask: NDArray[np.int64]) -> FloatArray:
        """Runs the graph.

        Args:
            ids: int64 [n, length], token ids.
            mask: int64 [n, length], 1 for tokens and 0 for padding on the right.

        Returns:
            float32 [n, dimension].
        """
        (vectors,) = self._run([OUTPUT], ids, mask)
        return vectors

    def _run(
        self, outputs: list[str], ids: NDArray[np.int64], mask: NDArray[np.int64]
    ) -> list[FloatArray]:
        inputs = {"input_ids": ids, "attention_mask": mask}
        found = self._session.run(outputs, inputs, self._run_options)
        return [np.asarray(values, dtype=np.float32) for values in found]


class OnnxTokenEncoder(OnnxEncoder):
    """A document encoder that also returns the token vectors of each text, pooled and encoded."""

    def __init__(
        self, spec: EncoderSpec, folder: Path, threads: int, token_vectors: TokenVectorSpec
    ) -> None:
        super().__init__(spec, folder, threads)
        expected, found = token_vectors.dimension, self.token_dimension
        if found != expected:
            reason = f"has token vectors of {found} dimensions, but {expected} in the pair's TOML "
            reason += "file: export the pair again (care late-interaction export)"
            raise PairError.at(folder / spec.weights, reason, "other_token_dimension")
        self._stored = token_vectors

    def encode_tokens(self, tokens: Sequence[Tokens]) -> Encoding:
        """Encodes texts that `tokenize` returned, with their token vectors."""
        encoding, found = self.encode_token_vectors(tokens)
        pooled = (late_interaction.pool_tokens(vectors, self._stored.pooling) for vectors in found)
        stored = [late_interaction.encode_tokens(vectors, self._stored.codec) for vectors in pooled]
        return replace(encoding, token_vectors=stored)


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
