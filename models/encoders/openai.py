"""A document encoder that asks a server: vLLM, TEI, infinity, or any with `/v1/embeddings`.

The extra `openai` installs what it needs.
"""

import asyncio
import base64
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any

import httpx2
import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from core.errors import EmbeddingServerError, TextRefusedError, VectorError
from core.text import with_prompt
from core.types import EncoderSpec, Encoding, FloatArray
from core.vectors import truncate_normalize

_PROBE = "care"
_CONNECT_SECONDS = 10.0
_LONGEST_BACKOFF = 30.0
# A quota that is used up can ask for a day; nobody means a build to wait for that.
_LONGEST_RETRY_AFTER = 300.0

_NO_ACCESS = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
# Servers disagree on what they answer to a text that is too long, or to too many texts.
_REFUSALS = (
    HTTPStatus.BAD_REQUEST,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    HTTPStatus.UNPROCESSABLE_ENTITY,
)


class OpenAIEncoder:
    """The document side of a pair, computed by a server with OpenAI's `/v1/embeddings`.

    The server computes native vectors; they are cut and normalised here. It says how many
    tokens it read for all texts of a request together, which are counted evenly over them,
    or as 0 if it does not say. It does not say which texts it cut: none is reported as
    truncated.

    Connections are opened anew for each call of `encode`, which therefore should hold many
    requests' texts, and may come from any thread, but not from a running event loop.

    Args:
        spec: The facts of the encoder; its files are not read.
        base_url: The server's address, with or without `/v1`.
        model: The name that the server knows the model by, or None for the spec's.
        api_key: The key to send, or None to send none.
        concurrency: Requests at once.
        request_texts: Texts in a request at most; 32 is what TEI takes by default.
        timeout: The longest that a request may take [s].
        retries: How often a request is repeated after 429, 408, 5xx, no answer in time or
            a broken connection.
        backoff: The longest wait before the first repetition, doubled by each [s].
        truncate: Whether to ask the server to cut texts at the spec's length, as vLLM can;
            others may refuse the request for the unknown field.

    Attributes:
        spec: The facts of the encoder.
        url: Where requests go to.

    Raises:
        EmbeddingServerError: If the address or the key cannot be used, or the server does
            not encode a first short text; it is not waited for if nobody listens there.
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
        retries: int = 6,
        backoff: float = 1.0,
        truncate: bool = False,
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
        self._backoff = backoff
        self._tls = httpx2.create_ssl_context()
        self._reached = False
        self._probe()

    def _probe(self) -> None:
        try:
            self.encode([_PROBE])
        except TextRefusedError as error:
            raise EmbeddingServerError(
                f"{self.url} refuses even a short text: its log says why"
            ) from error

    def encode(self, texts: Sequence[str]) -> Encoding:
        """Encodes texts, in as many requests as they need.

        Args:
            texts: At least one text, already under the text rules of `core.text`.

        Returns:
            float32 vectors [n, dimension] of unit norm, with token counts.

        Raises:
            TextRefusedError: If the server refuses a text.
            EmbeddingServerError: If it refuses all, or goes on failing.
            VectorError: If an answer is not what the spec and the protocol describe.
        """
        return asyncio.run(self._encode(texts))

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
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [
                        group.create_task(embed(start)) for start in range(0, len(texts), size)
                    ]
            except ExceptionGroup as errors:
                # Those that follow from the first are of no news.
                raise errors.exceptions[0] from None
        parts = [part for task in tasks for part in task.result()]
        vectors = np.concatenate([part.vectors for part in parts])
        return Encoding(
            vectors=truncate_normalize(vectors, self.spec.dimension),
            token_counts=np.concatenate([part.token_counts for part in parts]),
            truncated=np.zeros(len(texts), dtype=np.bool_),
        )

    async def _embed(
        self, client: httpx2.AsyncClient, texts: Sequence[str], position: int
    ) -> "list[_Embedded]":
        """Encodes texts, the first of which is at `position`, halved as often as is needed."""
        try:
            return [self._read(await self._answer(client, texts), len(texts))]
        except _RefusedError as error:
            if len(texts) == 1:
                raise TextRefusedError(
                    f"{self.url} refuses the text at position {position} of a batch "
                    f"with status {error.status}: it may be too long for the server",
                    position,
                ) from None
        middle = len(texts) // 2
        return [
            *await self._embed(client, texts[:middle], position),
            *await self._embed(client, texts[middle:], position + middle),
        ]

    async def _answer(self, client: httpx2.AsyncClient, texts: Sequence[str]) -> bytes:
        """Asks until the server answers, fails for good, or has failed too often."""
        backoff = self._backoff
        for left in range(self._retries, -1, -1):
            try:
                return await self._ask(client, texts)
            except _PassingError as error:
                if not left:
                    raise EmbeddingServerError(
                        f"{self.url} failed {self._retries + 1} times in a row, "
                        f"at last with {error.reason}"
                    ) from None
                jitter = random.uniform(0.5, 1)
                await asyncio.sleep(max(error.wait, jitter * min(backoff, _LONGEST_BACKOFF)))
                backoff *= 2
        raise AssertionError("the last attempt returns or raises")

    async def _ask(self, client: httpx2.AsyncClient, texts: Sequence[str]) -> bytes:
        try:
            async with asyncio.timeout(self._timeout):
                response = await client.post(self.url, json=self._body | {"input": texts})
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            reason = str(error) or "no connection in time"
            if not self._reached:
                raise EmbeddingServerError(f"{self.url} cannot be reached: {reason}") from error
            raise _PassingError(f"no connection ({reason})") from error
        except TimeoutError as error:
            raise _PassingError(f"no answer in {self._timeout:g} s") from error
        except httpx2.RequestError as error:
            raise _PassingError(f"a broken connection ({type(error).__name__})") from error
        self._reached = True
        self._require_success(response)
        return response.content

    def _require_success(self, response: httpx2.Response) -> None:
        """Raises for any status but 200; an answer's own words could quote a text."""
        status = response.status_code
        if status == HTTPStatus.OK:
            return
        if status in _REFUSALS:
            raise _RefusedError(status)
        if (
            status in (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)
            or status >= HTTPStatus.INTERNAL_SERVER_ERROR
        ):
            wait = _retry_after(response.headers.get("Retry-After", ""))
            if wait > _LONGEST_RETRY_AFTER:
                raise EmbeddingServerError(
                    f"{self.url} answers status {status} and asks to wait for {wait:.0f} s"
                )
            raise _PassingError(f"status {status}", wait)
        if status in _NO_ACCESS:
            fault = "the key is wrong" if self._headers else "it asks for a key"
            raise EmbeddingServerError(f"{self.url} answers status {status}: {fault}")
        if status == HTTPStatus.NOT_FOUND:
            raise EmbeddingServerError(
                f"{self.url} answers status 404: it does not know the model "
                f"'{self._body['model']}', or the address is wrong"
            )
        raise EmbeddingServerError(f"{self.url} answers status {status} instead of 200")

    def _read(self, body: bytes, count: int) -> "_Embedded":
        try:
            answer = _Answer.model_validate_json(body)
            vectors = {item.index: _vector(item.embedding) for item in answer.data}
        except ValueError:
            # Not chained: what is wrong in the body is quoted there.
            raise VectorError(
                f"{self.url} returned a body that is no answer to a request for embeddings"
            ) from None
        if len(answer.data) != count or set(vectors) != set(range(count)):
            raise VectorError(
                f"{self.url} returned {len(answer.data)} vectors for {count} texts, "
                f"with {len(vectors)} different indices"
            )
        lengths = {len(vector) for vector in vectors.values()}
        if lengths != {self.spec.native_dimension}:
            raise VectorError(
                f"{self.url} returned vectors of {', '.join(map(str, sorted(lengths)))} "
                f"dimensions instead of {self.spec.native_dimension}: "
                f"is it a server of {self.spec.model}?"
            )
        tokens = answer.usage.prompt_tokens if answer.usage else 0
        return _Embedded(
            vectors=np.stack([vectors[i] for i in range(count)]),
            token_counts=_evenly(tokens, count),
        )


@dataclass(frozen=True, slots=True)
class _Embedded:
    vectors: FloatArray
    token_counts: NDArray[np.int32]


class _Item(BaseModel):
    index: int
    embedding: str | list[float]


class _Usage(BaseModel):
    prompt_tokens: int = Field(0, ge=0, lt=2**31)


class _Answer(BaseModel):
    data: list[_Item]
    usage: _Usage | None = None


class _PassingError(Exception):
    """A fault that may be gone when the request is repeated, `wait` seconds from now."""

    def __init__(self, reason: str, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.reason = reason
        self.wait = wait


class _RefusedError(Exception):
    """The server will never take these texts together."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


def _embeddings_url(base_url: str) -> str:
    try:
        url = httpx2.URL(base_url)
    except httpx2.InvalidURL:
        url = httpx2.URL()
    plain = not (url.userinfo or url.query or url.fragment)
    if url.scheme not in ("http", "https") or not url.host or not plain:
        # Not quoted: it could hold a password.
        raise EmbeddingServerError("the server's address is not of the form http://host:port/v1")
    root = str(url).rstrip("/")
    return f"{root}/embeddings" if re.search(r"/v\d+$", root) else f"{root}/v1/embeddings"


def _authorization(api_key: str | None) -> dict[str, str]:
    if not api_key:
        return {}
    if not re.fullmatch(r"[!-~]+", api_key):
        raise EmbeddingServerError("the key for the server holds blanks or is not ASCII")
    return {"Authorization": f"Bearer {api_key}"}


def _retry_after(value: str) -> float:
    """Returns the seconds that a header `Retry-After` asks for: a number, or a date."""
    if value.strip().isdecimal():
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return 0.0


def _vector(embedding: str | list[float]) -> FloatArray:
    if isinstance(embedding, str):
        return np.frombuffer(base64.b64decode(embedding, validate=True), dtype="<f4")
    return np.array(embedding, dtype=np.float32)


def _evenly(total: int, count: int) -> NDArray[np.int32]:
    """Returns `count` whole numbers that differ by 1 at most and sum to `total`."""
    share, rest = divmod(total, count)
    return share + (np.arange(count) < rest).astype(np.int32)
