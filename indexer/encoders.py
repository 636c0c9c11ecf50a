"""The choice of what encodes the documents."""

import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from core.errors import CareError, PairError, ProviderError
from core.types import Encoder, EncoderSpec, OffsetTokenizer, Pair
from models.encoders.onnx import OnnxEncoder

ENCODERS = ("auto", "onnx", "transformers", "vllm", "openai")
DTYPES = ("auto", "float32", "bfloat16", "float16")

# Tokens that are encoded of a text, and whether it is cut; and what counts them for texts.
TokenCount = tuple[int, bool]
TokenCounter = Callable[[Sequence[str]], list[TokenCount]]

# vLLM schedules the texts of a batch by itself: it starves on few.
_BATCH_SIZES = {"vllm": 1024}
_BATCH_SIZE = 32


@dataclass(frozen=True, slots=True)
class EncoderOptions:
    """What the user asks for; the defaults are the command's.

    Attributes:
        encoder: One of `ENCODERS`; auto takes ONNX Runtime for files of ONNX, and for a
            checkpoint vLLM if it is installed and can read it, else transformers.
        threads: Threads of ONNX Runtime.
        dtype: One of `DTYPES`; auto is bfloat16 on a GPU and float32 on the processor.
        engines: Engines of vLLM that share the texts.
        tensor_parallel: GPUs that share one engine's model.
        base_url: Address of a server with `/v1/embeddings`.
        model: The name that the server knows the model by, or None for the spec's.
        concurrency: Requests to the server at once.
        batch_size: Texts in a request at most.
        truncate: Whether to ask the server to cut texts.
    """

    encoder: str = "auto"
    threads: int = 1
    dtype: str = "auto"
    engines: int = 1
    tensor_parallel: int = 1
    base_url: str | None = None
    model: str | None = None
    concurrency: int = 8
    batch_size: int = 32
    truncate: bool = False


def encoder_name(spec: EncoderSpec, asked: str) -> str:
    """Returns which of `ENCODERS` encodes, where "auto" was asked for perhaps."""
    return _automatic(spec) if asked == "auto" else asked


def default_batch_size(name: str) -> int:
    """Returns the texts of a batch, or of a request to a server, that suit an encoder."""
    return _BATCH_SIZES.get(name, _BATCH_SIZE)


def computation(name: str, dtype: str) -> str:
    """Returns what vectors depend on beside the spec; "" where the spec names the very file."""
    return "" if name == "onnx" else f"{name} {dtype}"


def token_counter(pair: Pair, options: EncoderOptions) -> TokenCounter:
    """Returns what counts the tokens of the document side, from the pair's own files.

    The weights of a checkpoint are not loaded. A server is taken to read the pair's tokens.

    Raises:
        PairError: If the pair's files cannot be read.
        ProviderError: If what reads them is not installed.
    """
    spec = pair.document
    if spec.format == "onnx":
        return offset_counter(OnnxEncoder(spec, pair.folder, options.threads), spec.max_length)
    try:
        from models.encoders.checkpoints import CheckpointTokenizer, checkpoint_folder
    except ModuleNotFoundError as error:
        raise ProviderError(f"{error.name} is not installed: pip install transformers") from error
    tokenizer = CheckpointTokenizer(spec, checkpoint_folder(spec, pair.folder))

    def count(texts: Sequence[str]) -> list[TokenCount]:
        return [(len(tokens.ids), tokens.truncated) for tokens in tokenizer(texts)]

    return count


def offset_counter(tokenizer: OffsetTokenizer, max_length: int) -> TokenCounter:
    """Returns what counts the tokens of texts that are cut at `max_length`."""

    def count(texts: Sequence[str]) -> list[TokenCount]:
        lengths = [len(tokenizer.token_offsets(text)) for text in texts]
        return [(min(length, max_length), length > max_length) for length in lengths]

    return count


def document_encoder(pair: Pair, options: EncoderOptions) -> Encoder:
    """Returns the encoder of the document side.

    Raises:
        CareError: If a server is asked for without its address.
        EmbeddingServerError: If the server cannot be used.
        PairError: If the pair's files cannot be read by this encoder.
        ProviderError: If what the encoder runs on is not installed.
    """
    spec = pair.document
    name = encoder_name(spec, options.encoder)
    if name == "openai":
        return _server_encoder(spec, options)
    if (name == "onnx") != (spec.format == "onnx"):
        raise PairError(
            f"encoder '{name}' cannot read format '{spec.format}', in which pair '{pair.name}' "
            "has its document side"
        )
    if name == "onnx":
        return OnnxEncoder(spec, pair.folder, options.threads)
    try:
        if name == "vllm":
            from models.encoders.vllm import VllmEncoder

            return VllmEncoder(
                spec,
                pair.folder,
                dtype=options.dtype,
                engines=options.engines,
                tensor_parallel=options.tensor_parallel,
            )
        from models.encoders.transformers import TransformersEncoder

        return TransformersEncoder(spec, pair.folder, dtype=options.dtype)
    except ModuleNotFoundError as error:
        raise ProviderError(
            f"{error.name} is not installed: pip install torch transformers, or with vllm both"
        ) from error


def _server_encoder(spec: EncoderSpec, options: EncoderOptions) -> Encoder:
    if not options.base_url:
        raise CareError("--encoder openai needs --base-url, the address of a server")
    try:
        from models.encoders.openai import OpenAIEncoder
    except ModuleNotFoundError as error:
        raise ProviderError(
            f"--encoder openai needs {error.name}: pip install 'care-retrieval[openai]'"
        ) from error
    return OpenAIEncoder(
        spec,
        options.base_url,
        model=options.model,
        api_key=os.environ.get("OPENAI_API_KEY"),
        concurrency=options.concurrency,
        request_texts=options.batch_size,
        truncate=options.truncate,
    )


def _automatic(spec: EncoderSpec) -> str:
    if spec.format == "onnx":
        return "onnx"
    return "vllm" if importlib.util.find_spec("vllm") and not spec.adapter else "transformers"
