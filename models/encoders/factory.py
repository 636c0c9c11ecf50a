"""The one place that makes encoders: by pair, side and backend."""

import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from core.cpus import available_cpus
from core.encoders import Encoder, EncoderSpec, OffsetTokenizer, Pair
from core.errors import CareError, PairError, ProviderError
from models.encoders.onnx import OnnxEncoder
from models.encoders.tokenizer import file_tokenizer

BACKENDS = ("auto", "onnx", "transformers", "vllm", "openai")
DTYPES = ("auto", "float32", "bfloat16", "float16")

# Tokens that are encoded of a text, and whether it is truncated; and what counts them for texts.
TokenCount = tuple[int, bool]
TokenCounter = Callable[[Sequence[str]], list[TokenCount]]

_TRAINING = (
    "run this by .venv-test/bin/python, the environment of make train, "
    "or pip install 'care-retrieval[train]'"
)


@dataclass(frozen=True, slots=True)
class EncoderOptions:
    """What encodes, as the user asks for it; the defaults and the meanings are the command's.

    Attributes:
        backend: One of `BACKENDS`; auto takes ONNX Runtime for files of ONNX, and for a
            checkpoint vLLM if it is installed and can read it, else transformers.
        threads: Of ONNX Runtime, 0 for all processors that the process may use.
        dtype: One of `DTYPES`; auto is bfloat16 on a GPU and float32 on the processor.
        model: The name that a server knows the model by, or None for the spec's.
    """

    backend: str = "auto"
    threads: int = 0
    dtype: str = "auto"
    replicas: int = 1
    tensor_parallel: int = 1
    base_url: str | None = None
    model: str | None = None
    concurrency: int = 8
    batch_size: int = 32
    truncate: bool = False


def resolve_backend(spec: EncoderSpec, asked: str) -> str:
    """Returns the backend that encodes: `asked`, or for "auto" what suits the spec."""
    if asked != "auto":
        return asked
    if spec.format == "onnx":
        return "onnx"
    as_it_is = not spec.adapter and "model_type" not in spec.config
    return "vllm" if as_it_is and importlib.util.find_spec("vllm") else "transformers"


def default_batch_size(backend: str) -> int:
    """Returns the texts of a batch, or of a request to a server, that suit a backend."""
    # vLLM schedules the texts of a batch by itself: it starves on few.
    return 1024 if backend == "vllm" else 32


def load_encoder(
    spec: EncoderSpec, folder: Path, threads: int = 0, *, dtype: str = "auto", device: str = "auto"
) -> Encoder:
    """Returns one side of a pair, by ONNX Runtime or transformers.

    The spec's paths are relative to `folder`. For `threads` and `dtype` see `EncoderOptions`;
    `device` is one of PyTorch, or "auto" for a GPU if there is one.

    Raises:
        PairError: If its files are missing or do not fit the spec.
        ProviderError: If what it runs on is not installed.
    """
    if spec.format == "onnx":
        return OnnxEncoder(spec, folder, threads or available_cpus())
    with _packages("a checkpoint", _TRAINING):
        from models.encoders.transformers import TransformersEncoder
    return TransformersEncoder(spec, folder, device=device, dtype=dtype)


def document_encoder(pair: Pair, options: EncoderOptions) -> Encoder:
    """Returns the encoder of the document side.

    Raises:
        CareError: If a server is asked for without its address.
        EmbeddingServerError: If the server cannot be used.
        PairError: If the pair's files cannot be read by this backend.
        ProviderError: If what the encoder runs on is not installed.
    """
    spec = pair.document
    backend = resolve_backend(spec, options.backend)
    if backend == "openai":
        return _server_encoder(pair, options)
    if (backend == "onnx") != (spec.format == "onnx"):
        message = (
            f"backend '{backend}' cannot read format '{spec.format}', in which pair '{pair.name}' "
            "has its document side"
        )
        raise PairError(message, code="backend_mismatch", backend=backend, format=spec.format)
    if backend != "vllm":
        return load_encoder(spec, pair.folder, options.threads, dtype=options.dtype)
    with _packages("vLLM", "pip install vllm"):
        from models.encoders.vllm import VllmEncoder
    return VllmEncoder(
        spec,
        pair.folder,
        dtype=options.dtype,
        replicas=options.replicas,
        tensor_parallel=options.tensor_parallel,
    )


def query_encoder(pair: Pair, options: EncoderOptions) -> Encoder:
    """Returns the encoder of the query side, which recall and canaries are measured with.

    It is ONNX Runtime for files of ONNX, and transformers for a checkpoint. vLLM takes the
    memory of a GPU for itself: beside it queries are encoded on the processor. Errors are those
    of `load_encoder`.
    """
    beside_vllm = resolve_backend(pair.document, options.backend) == "vllm"
    device = "cpu" if beside_vllm else "auto"
    return load_encoder(pair.query, pair.folder, options.threads, device=device)


def token_counter(pair: Pair, threads: int = 0) -> TokenCounter:
    """Returns what counts the tokens of the document side, from the pair's own files.

    The weights of a checkpoint are not read. A server is taken to read the pair's tokens. Errors
    are those of `load_encoder`.
    """
    spec = pair.document
    if spec.format == "onnx":
        encoder = OnnxEncoder(spec, pair.folder, threads or available_cpus())
        return offset_counter(encoder, spec.max_length)
    return offset_counter(_tokenizer(pair), spec.max_length)


def offset_counter(tokenizer: OffsetTokenizer, max_length: int) -> TokenCounter:
    """Returns what counts the tokens of texts that are truncated at `max_length`."""

    def count(texts: Sequence[str]) -> list[TokenCount]:
        lengths = [len(tokenizer.token_offsets(text)) for text in texts]
        return [(min(length, max_length), length > max_length) for length in lengths]

    return count


def _server_encoder(pair: Pair, options: EncoderOptions) -> Encoder:
    if not options.base_url:
        message = "--backend openai needs --base-url, the address of a server"
        raise CareError(message, code="missing_base_url")
    with _packages("--backend openai", "pip install 'care-retrieval[openai]'"):
        from models.encoders.openai import OpenAIEncoder
    return OpenAIEncoder(
        pair.document,
        options.base_url,
        model=options.model,
        api_key=os.environ.get("OPENAI_API_KEY"),
        concurrency=options.concurrency,
        request_texts=options.batch_size,
        truncate=options.truncate,
        load_tokenizer=partial(_tokenizer, pair),
    )


def _tokenizer(pair: Pair) -> OffsetTokenizer:
    """Loads what the document side's texts are tokenized with."""
    spec = pair.document
    if spec.format == "onnx":
        return file_tokenizer(spec, pair.folder)
    with _packages("a checkpoint's tokenizer", _TRAINING):
        from models.encoders.checkpoints import checkpoint_folder, checkpoint_tokenizer
    return checkpoint_tokenizer(spec, checkpoint_folder(spec, pair.folder, tokenizer_only=True))


@contextmanager
def _packages(what: str, hint: str) -> Iterator[None]:
    """Names the package that an import lacks, and how to get it."""
    try:
        yield
    except ModuleNotFoundError as error:
        message = f"{what} needs {error.name}, which is not installed: {hint}"
        raise ProviderError(message, code="missing_package", package=error.name) from error
