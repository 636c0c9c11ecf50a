"""The choice of what encodes the documents, and the queries that an index is checked with."""

import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from core.errors import CareError, PairError, ProviderError
from core.types import Encoder, EncoderSpec, OffsetTokenizer, Pair
from models.encoders.onnx import FileTokenizer, OnnxEncoder

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


def token_counter(pair: Pair, threads: int) -> TokenCounter:
    """Returns what counts the tokens of the document side, from the pair's own files.

    The weights of a checkpoint are not asked for. A server is taken to read the pair's tokens.

    Raises:
        PairError: If the pair's files cannot be read.
        ProviderError: If what reads them is not installed.
    """
    spec = pair.document
    if spec.format == "onnx":
        return offset_counter(OnnxEncoder(spec, pair.folder, threads), spec.max_length)
    return offset_counter(_load_tokenizer(pair), spec.max_length)


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
        return _ServerEncoder(_server_encoder(spec, options), partial(_load_tokenizer, pair))
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


def query_encoder(pair: Pair, options: EncoderOptions) -> Encoder:
    """Returns the encoder of the query side, which recall and canaries are measured with.

    It is ONNX Runtime for files of ONNX, and transformers for a checkpoint. vLLM takes the
    memory of a GPU for itself: beside it queries are encoded on the processor.

    Raises:
        PairError: If the pair's files cannot be read.
        ProviderError: If what the encoder runs on is not installed.
    """
    if pair.query.format == "onnx":
        return OnnxEncoder(pair.query, pair.folder, options.threads)
    document = _automatic(pair.document) if options.encoder == "auto" else options.encoder
    try:
        from models.encoders.transformers import TransformersEncoder
    except ModuleNotFoundError as error:
        raise ProviderError(
            f"{error.name} is not installed: pip install torch transformers"
        ) from error
    device = "cpu" if document == "vllm" else "auto"
    return TransformersEncoder(pair.query, pair.folder, device=device)


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


class _ServerEncoder:
    """A server's vectors and the pair's own tokens: a server does not show its.

    Args:
        server: What asks the server.
        load_tokenizer: Loads the tokenizer; called only if tokens are asked for.
    """

    def __init__(self, server: Encoder, load_tokenizer: Callable[[], OffsetTokenizer]) -> None:
        self.spec = server.spec
        self.encode = server.encode
        self._load_tokenizer = load_tokenizer

    @cached_property
    def _tokenizer(self) -> OffsetTokenizer:
        return self._load_tokenizer()

    def token_offsets(self, text: str) -> Sequence[tuple[int, int]]:
        return self._tokenizer.token_offsets(text)


def _load_tokenizer(pair: Pair) -> OffsetTokenizer:
    """Loads what the document side's texts are tokenized with."""
    spec = pair.document
    if spec.format == "onnx":
        return FileTokenizer(spec, pair.folder)
    try:
        from models.encoders.checkpoints import CheckpointTokenizer, checkpoint_folder
    except ModuleNotFoundError as error:
        raise ProviderError(f"{error.name} is not installed: pip install transformers") from error
    return CheckpointTokenizer(spec, checkpoint_folder(spec, pair.folder, tokenizer_only=True))


def _automatic(spec: EncoderSpec) -> str:
    if spec.format == "onnx":
        return "onnx"
    as_it_is = not spec.adapter and "model_type" not in spec.config
    return "vllm" if as_it_is and importlib.util.find_spec("vllm") else "transformers"
