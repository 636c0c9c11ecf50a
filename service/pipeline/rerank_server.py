"""A reranker behind `/v1/rerank`, as Cohere, Jina, vLLM, infinity and others have it.

Requires the extra `rerank`.
"""

import math
from collections.abc import Sequence
from typing import Any

import httpx2
import numpy as np
from pydantic import BaseModel

from core.breaker import Breaker, UnavailableError
from core.types import FloatArray
from models.servers import BadResponseError, client_of, post

# Most bytes of a response besides the documents, which some servers return.
_OTHER_BYTES = 1 << 20
_UTF8_BYTES = 4
_FAILURES = (TimeoutError, httpx2.RequestError)


class RerankServer:
    """Scores documents for a query.

    Queries and documents are sent to this address only; redirects are not followed. The log has
    neither a query nor the body of a response. After three failures in a row, calls fail at once,
    except one test call every five seconds.

    `timeout` is that of a call, with connecting [s]; `truncate_tokens` the most tokens of query and
    document together, sent as vLLM's `truncate_prompt_tokens`. A model or key that is "" is not
    sent.
    """

    def __init__(
        self,
        url: str,
        model: str,
        api_key: str,
        timeout: float,
        breaker: Breaker,
        truncate_tokens: int | None = None,
    ) -> None:
        self._url, self._client = client_of("CARE_RERANK", url, api_key, "rerank")
        self._body: dict[str, Any] = {"model": model} if model else {}
        if truncate_tokens:
            self._body["truncate_prompt_tokens"] = truncate_tokens
        self._timeout = timeout
        self._breaker = breaker

    async def scores(self, query: str, texts: Sequence[str]) -> FloatArray:
        """Returns the score of each text for a query, float32 [n].

        UnavailableError if the server does not answer in time, or not with one finite score for
        each text.
        """
        try:
            with self._breaker.call(*_FAILURES, reason=_reason):
                return _read(await self._request(query, texts), len(texts))
        except _FAILURES as error:
            raise UnavailableError(_reason(error)) from None

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.aclose()

    async def _request(self, query: str, texts: Sequence[str]) -> bytes:
        body = {**self._body, "query": query, "documents": list(texts), "top_n": len(texts)}
        limit = _OTHER_BYTES + 2 * _UTF8_BYTES * sum(map(len, texts))
        response = await post(self._client, self._url, body, seconds=self._timeout, limit=limit)
        if response.status_code != 200:
            raise BadResponseError(f"status {response.status_code}")
        return response.content


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, BadResponseError) else type(error).__name__


class _Result(BaseModel):
    index: int
    relevance_score: float


class _Response(BaseModel):
    results: list[_Result]


def _read(body: bytes, count: int) -> FloatArray:
    try:
        results = _Response.model_validate_json(body).results
    except ValueError:
        raise BadResponseError("no response of /v1/rerank") from None
    scores = {result.index: result.relevance_score for result in results}
    if len(results) != count or scores.keys() != set(range(count)):
        raise BadResponseError(f"{len(results)} results for {count} documents")
    if not all(map(math.isfinite, scores.values())):
        raise BadResponseError("a score that is not finite")
    return np.array([scores[i] for i in range(count)], np.float32)
