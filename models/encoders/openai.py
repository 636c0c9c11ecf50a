"""A document encoder on a server with `/v1/embeddings`, such as vLLM, TEI or infinity.

Requires the extra `openai`.
"""

import asyncio
import base64
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import httpx2
import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from core.encoders import EncoderSpec, Encoding, OffsetTokenizer
from core.errors import EmbeddingServerError, PairError, TextRejectedError, VectorError
from core.retries import RetryPolicy, TransientError, is_rejection, is_transient, retry_after
from core.types import FloatArray
from core.vectors import truncate_normalize
from models.servers import TooLongError, authorization, http_client, post, route_url

_CONNECT_SECONDS = 10.0
# Largest response: one number of a vector as decimal digits, and everything else.
_NUMBER_BYTES, _OTHER_BYTES = 32, 16 * 1024 * 1024

# Vectors, float32 [n, native dimension], and token counts, int32 [n].
_Embedded = tuple[FloatArray, NDArray[np.int32]]


class OpenAIEncoder:
    """The document encoder of a pair on a server with OpenAI's `/v1/embeddings`.

    The server returns native vectors, which are truncated and normalised here. It reports the
    number of tokens per request; they are distributed evenly over the texts (0 if it reports none).
    It does not report which texts it truncated, so `truncated` is false for all texts.

    Redirects are not followed: texts and key are sent to `base_url` only. A response is read up to
    the size that its vectors can have.

    Each call of `encode` opens new connections, so a call should have the texts of many requests.
    Calls may be made from any thread, but not from a running event loop.

    Args:
        spec: Specification of the document encoder.
        base_url: Address of the server, with or without `/v1`.
        model: Name of the model on the server, or None for that in the specification.
        api_key: API key of the server, or None.
        concurrency: Concurrent requests.
        request_texts: Maximum texts per request; 32 is the default limit of TEI.
        timeout: Time-out of a request [s].
        retries: When failed requests are retried.
        truncate: Whether to request truncation at the maximum length, which vLLM supports; other
            servers may reject the unknown field.
        load_tokenizer: Loads the tokenizer for `token_offsets`, because servers do not return
            tokens.
    """

    def __init__(
        self,
        spec: EncoderSpec,
        base_url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        concurrency: int = 8,
        request_texts: int = 32,
        timeout: float = 300.0,
        retries: RetryPolicy = RetryPolicy(),  # noqa: B008 (it is immutable)
        truncate: bool = False,
        load_tokenizer: Callable[[], OffsetTokenizer] | None = None,
    ) -> None:
        self.spec = spec
        url, headers = route_url(base_url, "embeddings"), authorization(api_key or "")
        if url is None:
            # Not quoted, because it can contain a password.
            message = "the address of the embedding server is invalid: use http://host:port/v1"
            raise EmbeddingServerError(message, code="bad_base_url")
        if headers is None:
            message = "the API key of the embedding server contains spaces or is not ASCII"
            raise EmbeddingServerError(message, code="bad_api_key")
        self.url = url
        self._headers = headers
        self._body: dict[str, Any] = {"model": model or spec.model, "encoding_format": "base64"}
        if truncate:
            self._body["truncate_prompt_tokens"] = spec.max_length
        self._concurrency = concurrency
        self._request_texts = request_texts
        self._timeout = timeout
        self._retries = retries
        self._load_tokenizer = load_tokenizer
        self._tls = httpx2.create_ssl_context()
        self._reached = False
        try:
            self.encode(["care"])
        except TextRejectedError as error:
            reason = "rejects a short test text: see the log of the server"
            raise self._failure(reason, "embedding_server_rejects") from error

    def encode(self, texts: Sequence[str]) -> Encoding:
        """Encodes at least one normalised text, in as many requests as needed."""
        return asyncio.run(self._encode(texts))

    @cached_property
    def _tokenizer(self) -> OffsetTokenizer:
        if not self._load_tokenizer:
            raise PairError(f"no tokenizer is set for {self.url}", code="no_tokenizer")
        return self._load_tokenizer()

    def token_offsets(self, text: str) -> Sequence[tuple[int, int]]:
        """Returns the start and end of each token of a text, by the tokenizer of the pair."""
        return self._tokenizer.token_offsets(text)

    async def _encode(self, texts: Sequence[str]) -> Encoding:
        prompted = [self.spec.prompt + text for text in texts]
        # Smaller requests if there are few texts, so that all connections are used.
        size = min(self._request_texts, -(-len(texts) // self._concurrency))
        permits = asyncio.Semaphore(self._concurrency)

        async def embed(start: int) -> list[_Embedded]:
            async with permits:
                return await self._embed(client, prompted[start : start + size], start)

        async with http_client(
            httpx2.AsyncClient,
            self.url,
            headers=self._headers,
            verify=self._tls,
            timeout=httpx2.Timeout(None, connect=_CONNECT_SECONDS),
            # The semaphore limits connections; waiting for it must not count towards the time-out.
            limits=httpx2.Limits(),
        ) as client:
            starts = range(0, len(texts), size)
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(embed(start)) for start in starts]
            except ExceptionGroup as errors:
                # Report the first error only; it cancelled the other tasks.
                raise errors.exceptions[0] from None
        vectors, tokens = zip(*(part for task in tasks for part in task.result()), strict=True)
        return Encoding(
            vectors=truncate_normalize(np.concatenate(vectors), self.spec.dimension),
            token_counts=np.concatenate(tokens),
            truncated=np.zeros(len(texts), dtype=np.bool_),
        )

    async def _embed(
        self, client: httpx2.AsyncClient, texts: Sequence[str], position: int
    ) -> list[_Embedded]:
        """Encodes texts from `position` on; bisects requests that the server rejects."""
        try:
            body = await self._retries.run(lambda: self._request(client, texts))
            return [self._read(body, len(texts))]
        except TransientError as error:
            if error.wait > self._retries.longest_wait:
                reason = f"failed with {error.reason} and requests a wait of {error.wait:.0f} s"
                raise self._failure(reason, "embedding_server_busy", seconds=error.wait) from None
            attempts = self._retries.retries + 1
            reason = f"failed {attempts} times in a row, the last time with {error.reason}"
            fields = {"attempts": attempts, "reason": error.reason}
            raise self._failure(reason, "embedding_server_failed", **fields) from None
        except _RejectedError as error:
            if len(texts) == 1:
                raise TextRejectedError(
                    f"{self.url} rejects the text at position {position} of a batch with status "
                    f"{error}: it may be too long for the server",
                    position,
                ) from None
        middle = len(texts) // 2
        return [
            *await self._embed(client, texts[:middle], position),
            *await self._embed(client, texts[middle:], position + middle),
        ]

    async def _request(self, client: httpx2.AsyncClient, texts: Sequence[str]) -> bytes:
        limit = len(texts) * self.spec.native_dimension * _NUMBER_BYTES + _OTHER_BYTES
        body = self._body | {"input": texts}
        try:
            response = await post(client, self.url, body, seconds=self._timeout, limit=limit)
        except TooLongError as error:
            message = f"{error} for {len(texts)} texts"
            raise self._invalid(message, "bad_embedding_answer", limit=limit) from None
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            reason = str(error) or "time-out"
            if not self._reached:
                message = f"cannot be reached ({reason}): check --base-url and the server"
                raise self._failure(message, "embedding_server_unreachable") from error
            raise TransientError(f"no connection ({reason})") from error
        except TimeoutError as error:
            raise TransientError(f"no response within {self._timeout:g} s") from error
        except httpx2.RequestError as error:
            raise TransientError(f"a broken connection ({type(error).__name__})") from error
        self._reached = True
        status = response.status_code
        if status == 200:
            return response.content
        if is_rejection(status):
            raise _RejectedError(status)
        if is_transient(status):
            wait = retry_after(response.headers.get("Retry-After"))
            raise TransientError(f"status {status}", wait)
        # The body of the response is not quoted, because it can contain a text.
        hints = dict.fromkeys(
            (401, 403), "the key is wrong" if self._headers else "set OPENAI_API_KEY"
        )
        if response.is_redirect:
            hints[status] = "redirects are not followed: check --base-url"
        hints[404] = f"the model '{self._body['model']}' is unknown, or the address is wrong"
        reason = f"returned status {status}: {hints.get(status, 'see the log of the server')}"
        raise self._failure(reason, "embedding_server_status", status=status)

    def _failure(self, problem: str, code: str, /, **fields: Any) -> EmbeddingServerError:
        return EmbeddingServerError(f"{self.url} {problem}", code=code, url=self.url, **fields)

    def _invalid(self, response: str, code: str, /, **fields: Any) -> VectorError:
        return VectorError(f"{self.url} returned {response}", code=code, url=self.url, **fields)

    def _read(self, body: bytes, count: int) -> _Embedded:
        try:
            response = _Response.model_validate_json(body)
            vectors = {item.index: _vector(item.embedding) for item in response.data}
        except ValueError:
            # Not chained, because the original error quotes the body.
            message = "a body that is not a response of /v1/embeddings"
            raise self._invalid(message, "bad_embedding_answer") from None
        found, indices = len(response.data), len(vectors)
        if found != count or set(vectors) != set(range(count)):
            message = f"{found} vectors for {count} texts, with {indices} distinct indices"
            fields = {"found": found, "expected": count, "indices": indices}
            raise self._invalid(message, "bad_vector_count", **fields)
        native = self.spec.native_dimension
        lengths = sorted(set(map(len, vectors.values())))
        if lengths != [native]:
            sizes = ", ".join(map(str, lengths))
            hint = f"check that it serves {self.spec.model}"
            message = f"vectors of {sizes} dimensions instead of {native}: {hint}"
            raise self._invalid(message, "other_dimension", found=lengths, expected=native)
        share, rest = divmod(response.usage.prompt_tokens if response.usage else 0, count)
        tokens = share + (np.arange(count) < rest).astype(np.int32)
        return np.stack([vectors[i] for i in range(count)]), tokens


class _Item(BaseModel):
    index: int
    embedding: str | list[float]


class _Usage(BaseModel):
    prompt_tokens: int = Field(0, ge=0, lt=2**31)


class _Response(BaseModel):
    data: list[_Item]
    usage: _Usage | None = None


class _RejectedError(Exception):
    """The server rejects a request permanently; the argument is the status."""


def _vector(embedding: str | list[float]) -> FloatArray:
    if isinstance(embedding, str):
        return np.frombuffer(base64.b64decode(embedding, validate=True), dtype="<f4")
    return np.array(embedding, dtype=np.float32)
