"""A document encoder that asks a server: vLLM, TEI, infinity, or any with `/v1/embeddings`.

The extra `openai` installs what it needs.
"""

import asyncio
import base64
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import httpx2
import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from core.encoders import EncoderSpec, Encoding, OffsetTokenizer
from core.errors import EmbeddingServerError, PairError, TextRefusedError, VectorError
from core.retries import RetryPolicy, TransientError, is_transient, retry_after
from core.text import with_prompt
from core.types import FloatArray
from core.vectors import truncate_normalize

_CONNECT_SECONDS = 10.0
# Servers disagree on what they answer to a text that is too long, or to too many texts.
_REJECTIONS = (400, 413, 422)

# float32 [n, native dimension], and int32 [n], tokens.
_Embedded = tuple[FloatArray, NDArray[np.int32]]


class OpenAIEncoder:
    """The document side of a pair, computed by a server with OpenAI's `/v1/embeddings`.

    The server computes native vectors; they are truncated and normalised here. It says how many
    tokens it read for all texts of a request together, which are counted evenly over them,
    or as 0 if it does not say. It does not say which texts it truncated: none is reported.

    Connections are opened anew for each call of `encode`, which therefore should hold many
    requests' texts, and may come from any thread, but not from a running event loop.

    Args:
        base_url: The server's address, with or without `/v1`.
        model: The name that the server knows the model by, or None for the spec's.
        concurrency: Requests at once.
        request_texts: Texts in a request at most; 32 is what TEI takes by default.
        timeout: The longest that a request may take [s].
        truncate: Whether to ask the server to truncate texts at the spec's length, as vLLM can;
            others may reject the request for the unknown field.
        load_tokenizer: Loads what `token_offsets` reads: a server does not show its tokens.

    Raises:
        EmbeddingServerError: If the address or the key cannot be used, or the server does
            not encode a first short text; there is no retry if nobody listens there.
        VectorError: If it returns other vectors than the spec describes.
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
        self.url = _embeddings_url(base_url)
        self._headers = _authorization(api_key)
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
        except TextRefusedError as error:
            what = "rejects even a short text: its log says why"
            raise self._failure(what, "embedding_server_rejects") from error

    def encode(self, texts: Sequence[str]) -> Encoding:
        """Encodes at least one text, under the rules of `core.text`, in requests as needed.

        Raises:
            TextRefusedError: If the server rejects a text.
            EmbeddingServerError: If it rejects all, or goes on failing.
            VectorError: If an answer is not what the spec and the protocol describe.
        """
        return asyncio.run(self._encode(texts))

    @cached_property
    def _tokenizer(self) -> OffsetTokenizer:
        if not self._load_tokenizer:
            raise PairError(f"{self.url} does not show its tokens", code="no_tokenizer")
        return self._load_tokenizer()

    def token_offsets(self, text: str) -> Sequence[tuple[int, int]]:
        """Returns start and end of each token of a text, by the pair's own tokenizer."""
        return self._tokenizer.token_offsets(text)

    async def _encode(self, texts: Sequence[str]) -> Encoding:
        prompted = [with_prompt(self.spec.prompt, text) for text in texts]
        # A call with few texts still keeps all connections at work.
        size = min(self._request_texts, -(-len(texts) // self._concurrency))
        permits = asyncio.Semaphore(self._concurrency)

        async def embed(start: int) -> list[_Embedded]:
            async with permits:
                return await self._embed(client, prompted[start : start + size], start)

        async with httpx2.AsyncClient(
            headers=self._headers,
            verify=self._tls,
            timeout=httpx2.Timeout(None, connect=_CONNECT_SECONDS),
            # The permits bound connections; waiting for one must not count as the server's time.
            limits=httpx2.Limits(),
        ) as client:
            starts = range(0, len(texts), size)
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(embed(start)) for start in starts]
            except ExceptionGroup as errors:
                # Those that follow from the first are of no news.
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
        """Encodes texts, the first of which is at `position`, halved as often as is needed."""
        try:
            body = await self._retries.run(lambda: self._request(client, texts))
            return [self._read(body, len(texts))]
        except TransientError as error:
            if error.wait > self._retries.longest_wait:
                what = f"failed with {error.reason} and asks to wait for {error.wait:.0f} s"
                raise self._failure(what, "embedding_server_busy", seconds=error.wait) from None
            attempts = self._retries.retries + 1
            what = f"failed {attempts} times in a row, at last with {error.reason}"
            facts = {"attempts": attempts, "reason": error.reason}
            raise self._failure(what, "embedding_server_failed", **facts) from None
        except _RejectedError as error:
            if len(texts) == 1:
                raise TextRefusedError(
                    f"{self.url} rejects the text at position {position} of a batch "
                    f"with status {error}: it may be too long for the server",
                    position,
                ) from None
        middle = len(texts) // 2
        return [
            *await self._embed(client, texts[:middle], position),
            *await self._embed(client, texts[middle:], position + middle),
        ]

    async def _request(self, client: httpx2.AsyncClient, texts: Sequence[str]) -> bytes:
        try:
            async with asyncio.timeout(self._timeout):
                response = await client.post(self.url, json=self._body | {"input": texts})
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            reason = str(error) or "no connection in time"
            if not self._reached:
                what = f"cannot be reached: {reason}"
                raise self._failure(what, "embedding_server_unreachable") from error
            raise TransientError(f"no connection ({reason})") from error
        except TimeoutError as error:
            raise TransientError(f"no answer in {self._timeout:g} s") from error
        except httpx2.RequestError as error:
            raise TransientError(f"a broken connection ({type(error).__name__})") from error
        self._reached = True
        status = response.status_code
        if status == 200:
            return response.content
        if status in _REJECTIONS:
            raise _RejectedError(status)
        if is_transient(status):
            wait = retry_after(response.headers.get("Retry-After"))
            raise TransientError(f"status {status}", wait)
        # An answer's own words could quote a text.
        hints = dict.fromkeys((401, 403), "the key is wrong" if self._headers else "it needs a key")
        hints[404] = f"it does not know the model '{self._body['model']}', or the address is wrong"
        what = f"answers status {status}: {hints.get(status, '200 is expected')}"
        raise self._failure(what, "embedding_server_status", status=status)

    def _failure(self, what: str, code: str, **fields: Any) -> EmbeddingServerError:
        return EmbeddingServerError(f"{self.url} {what}", code=code, url=self.url, **fields)

    def _unusable(self, what: str, code: str, **fields: Any) -> VectorError:
        return VectorError(f"{self.url} returned {what}", code=code, url=self.url, **fields)

    def _read(self, body: bytes, count: int) -> _Embedded:
        try:
            answer = _Answer.model_validate_json(body)
            vectors = {item.index: _vector(item.embedding) for item in answer.data}
        except ValueError:
            # Not chained: what is wrong in the body is quoted there.
            what = "a body that is no answer to a request for embeddings"
            raise self._unusable(what, "bad_embedding_answer") from None
        found, indices = len(answer.data), len(vectors)
        if found != count or set(vectors) != set(range(count)):
            what = f"{found} vectors for {count} texts, with {indices} different indices"
            facts = {"found": found, "expected": count, "indices": indices}
            raise self._unusable(what, "bad_vector_count", **facts)
        native = self.spec.native_dimension
        lengths = sorted(set(map(len, vectors.values())))
        if lengths != [native]:
            sizes = ", ".join(map(str, lengths))
            hint = f"is it a server of {self.spec.model}?"
            what = f"vectors of {sizes} dimensions instead of {native}: {hint}"
            raise self._unusable(what, "other_dimension", found=lengths, expected=native)
        share, rest = divmod(answer.usage.prompt_tokens if answer.usage else 0, count)
        tokens = share + (np.arange(count) < rest).astype(np.int32)
        return np.stack([vectors[i] for i in range(count)]), tokens


class _Item(BaseModel):
    index: int
    embedding: str | list[float]


class _Usage(BaseModel):
    prompt_tokens: int = Field(0, ge=0, lt=2**31)


class _Answer(BaseModel):
    data: list[_Item]
    usage: _Usage | None = None


class _RejectedError(Exception):
    """The server will never take these texts together: its one argument is the status."""


def _embeddings_url(base_url: str) -> str:
    try:
        url = httpx2.URL(base_url)
    except httpx2.InvalidURL:
        url = httpx2.URL()
    plain = not (url.userinfo or url.query or url.fragment)
    if url.scheme not in ("http", "https") or not url.host or not plain:
        # Not quoted: it could hold a password.
        message = "the server's address is not of the form http://host:port/v1"
        raise EmbeddingServerError(message, code="bad_base_url")
    root = str(url).rstrip("/")
    return f"{root}/embeddings" if re.search(r"/v\d+$", root) else f"{root}/v1/embeddings"


def _authorization(api_key: str | None) -> dict[str, str]:
    if not api_key:
        return {}
    if not re.fullmatch(r"[!-~]+", api_key):
        message = "the key for the server holds blanks or is not ASCII"
        raise EmbeddingServerError(message, code="bad_api_key")
    return {"Authorization": f"Bearer {api_key}"}


def _vector(embedding: str | list[float]) -> FloatArray:
    if isinstance(embedding, str):
        return np.frombuffer(base64.b64decode(embedding, validate=True), dtype="<f4")
    return np.array(embedding, dtype=np.float32)
