"""A language model behind `/v1/chat/completions`, as OpenAI, vLLM, llama.cpp and others have it.

Requires httpx2, which the extra `chat` installs.
"""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any
from urllib.parse import urlsplit

import httpx2

from core.breaker import Breaker, BreakerState, UnavailableError
from models.servers import BadResponseError, client_of, limit_body

_LOG = logging.getLogger("care.service")

# Most bytes of a streamed answer with what stands around each piece, and most tokens of it.
_MAX_BYTES = 1 << 20
_MAX_TOKENS = 1024
_FAILURES = (TimeoutError, httpx2.RequestError)


class ChatServer:
    """Streams the answers of a language model.

    Messages are sent to this address only; redirects are not followed. The log has neither a
    message nor an answer. After three failures in a row, calls fail at once, except one test call
    every five seconds. `timeout` is that of a whole answer [s].
    """

    def __init__(self, url: str, model: str, api_key: str, timeout: float) -> None:
        self._url, self._client = client_of("CARE_CHAT", url, api_key, "chat/completions")
        self.host = urlsplit(self._url).netloc
        self._model = model
        self._timeout = timeout
        self._breaker = Breaker("the server of CARE_CHAT_URL")

    async def answer(self, messages: Sequence[Mapping[str, str]]) -> AsyncGenerator[str, None]:
        """Yields the pieces of an answer as they arrive; UnavailableError if it breaks off."""
        try:
            with self._breaker.call(*_FAILURES):
                async with asyncio.timeout(self._timeout), aclosing(self._pieces(messages)) as all_:
                    async for piece in all_:
                        yield piece
        except _FAILURES as error:
            reason = str(error) if isinstance(error, BadResponseError) else type(error).__name__
            if self._breaker.state is BreakerState.CLOSED:
                _LOG.warning("an answer failed", extra={"fields": {"reason": reason}})
            raise UnavailableError(reason) from None

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.aclose()

    async def _pieces(self, messages: Sequence[Mapping[str, str]]) -> AsyncGenerator[str, None]:
        body = {
            "model": self._model,
            "messages": list(messages),
            "stream": True,
            "temperature": 0,
            "max_tokens": _MAX_TOKENS,
        }
        async with self._client.stream("POST", self._url, json=body) as response:
            if response.status_code != 200:
                raise BadResponseError(f"status {response.status_code}")
            await limit_body(_MAX_BYTES, response)
            async for line in response.aiter_lines():
                if not line.startswith("data:"):
                    continue
                data = line.removeprefix("data:").strip()
                if data == "[DONE]":
                    return
                if piece := _content(data):
                    yield piece
        raise BadResponseError("a stream without an end")


def _content(data: str) -> str:
    """Returns the text in an event of the stream; "" if it has none."""
    try:
        event: Any = json.loads(data)
        choices = event["choices"]
        content = choices[0]["delta"].get("content") if choices else ""
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        raise BadResponseError("no event of /v1/chat/completions") from None
    return content if isinstance(content, str) else ""
