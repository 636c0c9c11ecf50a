"""Factory of encoders by pair, role and backend."""

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from core.encoders import Encoder, EncoderSpec, OffsetTokenizer, Pair, TokenVectorSpec
from core.errors import CareError, PairError, ProviderError, required_packages
from core.machine import available_cpus, cpu_flags
from core.retries import RetryPolicy
from models.encoders.onnx import OnnxEncoder, OnnxTokenEncoder
from models.encoders.tokenizer import file_tokenizer

# Number of encoded tokens of a text, and whether it is truncated.
TokenCount = tuple[int, bool]
TokenCounter = Callable[[Sequence[str]], list[TokenCount]]

# Instructions without which OpenVINO is slower in a dtype than in float32, or is wrong.
_INSTRUCTIONS: dict[str, set[str]] = {
    "bfloat16": {"amx_bf16", "avx512_bf16"},
    "int8": {"avx512_vnni"},
}

_RETRIES = RetryPolicy()

_TRAINING = (
    "run the command in .venv-test, the environment of make train, "
    "or pip install 'care-retrieval[train]'"
)


@dataclass(frozen=True, slots=True)
class EncoderOptions:
    """The options of `care index` for the document encoder, with the values that they stand for."""

    # One of `Backend`. "auto" is ONNX Runtime for ONNX files; for a checkpoint it is vLLM if it is
    # installed and supports the checkpoint, and otherwise transformers.
    backend: str = "auto"
    threads: int = 0  # threads of ONNX Runtime or OpenVINO; 0 for all available processors
    dtype: str = "auto"  # one of `Dtype`; see `resolve_dtype`
    replicas: int = 1
    tensor_parallel: int = 1
    base_url: str | None = None
    model: str | None = None
    concurrency: int = 8
    batch_size: int = 32
    truncate: bool = False
    timeout: float = 300.0  # of a request to a server [s]
    retries: RetryPolicy = _RETRIES  # of a request to a server
    # The token vectors that are computed beside vectors, for backend "onnx"; None for none.
    token_vectors: TokenVectorSpec | None = None


def resolve_backend(spec: EncoderSpec, backend: str) -> str:
    """Returns the backend for a specification; "auto" is resolved, see `EncoderOptions`."""
    if backend != "auto":
        return backend
    if spec.format == "onnx":
        return "onnx"
    unmodified = not spec.adapter and "model_type" not in spec.config
    return "vllm" if unmodified and importlib.util.find_spec("vllm") else "transformers"


def resolve_dtype(backend: str, dtype: str) -> str:
    """Returns the dtype of a backend; for OpenVINO "auto" is resolved by the processor.

    With AMX bfloat16 is the fastest, with VNNI alone int8, on other processors float32.
    """
    if dtype == ("float16" if backend == "openvino" else "int8"):
        message = f"--dtype {dtype} cannot be used with --backend {backend}"
        raise CareError(message, code="option_not_taken", option="--dtype")
    if backend != "openvino":
        return dtype
    flags = cpu_flags()
    if dtype == "auto":
        best = "int8" if flags & _INSTRUCTIONS["int8"] else "float32"
        return "bfloat16" if "amx_bf16" in flags else best
    needed = _INSTRUCTIONS.get(dtype)
    if needed and not flags & needed:
        message = (
            f"this processor has no instructions for {dtype} ({' or '.join(sorted(needed))}): use "
            "--dtype float32; in an update with --encode-all, because vectors differ"
        )
        raise ProviderError(message, code="unsupported_dtype", dtype=dtype)
    return dtype


def default_batch_size(backend: str) -> int:
    """Returns the default number of texts per batch, or per request to a server."""
    # vLLM schedules the texts of a batch itself and needs many of them.
    return 1024 if backend == "vllm" else 32


def load_encoder(
    spec: EncoderSpec, folder: Path, threads: int = 0, *, dtype: str = "auto", device: str = "auto"
) -> Encoder:
    """Loads an encoder with ONNX Runtime or transformers.

    Paths in the specification are relative to `folder`. For `threads` and `dtype` see
    `EncoderOptions`; `device` is a device of PyTorch, and "auto" a GPU if available.

    Raises:
        PairError: If files are missing or do not match the specification.
        ProviderError: If a required package is not installed.
    """
    if spec.format == "onnx":
        return OnnxEncoder(spec, folder, threads or available_cpus())
    with required_packages("a checkpoint", _TRAINING):
        from models.encoders.transformers import TransformersEncoder
    return TransformersEncoder(spec, folder, device=device, dtype=dtype)


def document_encoder(pair: Pair, options: EncoderOptions) -> Encoder:
    """Loads the document encoder of a pair.

    Raises:
        CareError: If the backend is a server and its address is not set.
        EmbeddingServerError: If the server cannot be used.
        PairError: If files are missing or not supported by the backend.
        ProviderError: If a required package is not installed.
    """
    spec = pair.document
    backend = resolve_backend(spec, options.backend)
    if backend == "openai":
        return _server_encoder(pair, options)
    if (backend in ("onnx", "openvino")) != (spec.format == "onnx"):
        message = (
            f"backend '{backend}' does not support the document encoder of pair '{pair.name}', "
            f"whose format is '{spec.format}': use --backend auto"
        )
        raise PairError(message, code="backend_mismatch", backend=backend, format=spec.format)
    if backend == "openvino":
        with required_packages("--backend openvino", "pip install 'care-retrieval[openvino]'"):
            # Otherwise the import of OpenVINO sends a usage event over the network.
            sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]
            from models.encoders.openvino import OpenVinoEncoder
        dtype = resolve_dtype(backend, options.dtype)
        return OpenVinoEncoder(spec, pair.folder, options.threads or available_cpus(), dtype)
    if backend == "onnx" and (stored := options.token_vectors):
        return OnnxTokenEncoder(spec, pair.folder, options.threads or available_cpus(), stored)
    if backend != "vllm":
        return load_encoder(spec, pair.folder, options.threads, dtype=options.dtype)
    with required_packages("vLLM", "pip install vllm"):
        from models.encoders.vllm import VllmEncoder
    return VllmEncoder(
        spec,
        pair.folder,
        dtype=options.dtype,
        replicas=options.replicas,
        tensor_parallel=options.tensor_parallel,
    )


def query_encoder(pair: Pair, options: EncoderOptions) -> Encoder:
    """Loads the query encoder of a pair, for the measurement of recall and the canaries.

    If vLLM encodes the documents, it allocates the GPU memory, so queries are encoded on the
    processor.
    """
    with_vllm = resolve_backend(pair.document, options.backend) == "vllm"
    device = "cpu" if with_vllm else "auto"
    return load_encoder(pair.query, pair.folder, options.threads, device=device)


def token_counter(pair: Pair, threads: int = 0) -> TokenCounter:
    """Returns a function that counts the tokens of texts as the document encoder does.

    Only the tokenizer is loaded; a server is assumed to use the same.
    """
    spec = pair.document
    if spec.format == "onnx":
        encoder = OnnxEncoder(spec, pair.folder, threads or available_cpus())
        return offset_counter(encoder, spec.max_length)
    return offset_counter(_tokenizer(pair), spec.max_length)


def offset_counter(tokenizer: OffsetTokenizer, max_length: int) -> TokenCounter:
    """Returns a function that counts the tokens of texts, truncated at `max_length` tokens."""

    def count(texts: Sequence[str]) -> list[TokenCount]:
        lengths = [len(tokenizer.token_offsets(text)) for text in texts]
        return [(min(length, max_length), length > max_length) for length in lengths]

    return count


def sentence_model(name: str) -> Pair:
    """Returns a model of sentence-transformers as a pair, by its folder or its name on the Hub."""
    with required_packages("a sentence-transformers model", _TRAINING):
        from models.encoders import sentence_models
    return sentence_models.sentence_model(name)


def weights_bytes(spec: EncoderSpec, folder: Path) -> int:
    """Returns the size [bytes] of an encoder's weights; paths are relative to `folder`."""
    if spec.format == "onnx":
        return (folder / spec.weights).stat().st_size
    from models.encoders.checkpoints import checkpoint_folder

    folder = checkpoint_folder(spec, folder)
    weights = list(folder.glob("*.safetensors")) or list(folder.glob("pytorch_model*.bin"))
    return sum(path.stat().st_size for path in weights)


def _server_encoder(pair: Pair, options: EncoderOptions) -> Encoder:
    if not options.base_url:
        message = "--backend openai requires --base-url, the address of the server"
        raise CareError(message, code="missing_base_url")
    with required_packages("--backend openai", "pip install 'care-retrieval[openai]'"):
        from models.encoders.openai import OpenAIEncoder
    return OpenAIEncoder(
        pair.document,
        options.base_url,
        model=options.model,
        api_key=os.environ.get("OPENAI_API_KEY"),
        concurrency=options.concurrency,
        request_texts=options.batch_size,
        timeout=options.timeout,
        retries=options.retries,
        truncate=options.truncate,
        load_tokenizer=partial(_tokenizer, pair),
    )


def _tokenizer(pair: Pair) -> OffsetTokenizer:
    spec = pair.document
    if spec.format == "onnx":
        return file_tokenizer(spec, pair.folder)
    with required_packages("a checkpoint's tokenizer", _TRAINING):
        from models.encoders.checkpoints import checkpoint_folder, checkpoint_tokenizer
    return checkpoint_tokenizer(spec, checkpoint_folder(spec, pair.folder, tokenizer_only=True))
