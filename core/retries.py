"""When and how requests to a server are repeated; one policy for all servers that are asked."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TypeVar

T = TypeVar("T")

_LONGEST_BACKOFF = 60.0


class TransientError(Exception):
    """A failure that may be gone when the request is repeated.

    Attributes:
        reason: What happened.
        wait: The least time until the request is repeated [s].
    """

    def __init__(self, reason: str, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.reason = reason
        self.wait = wait


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential backoff with jitter.

    Attributes:
        retries: Repetitions of a request at most.
        backoff: The longest wait before the first repetition, doubled by each [s].
        longest_wait: A server that asks to wait for longer than this counts as failed [s].
    """

    retries: int = 6
    backoff: float = 1.0
    longest_wait: float = 300.0

    async def run(
        self,
        request: Callable[[], Awaitable[T]],
        on_retry: Callable[[TransientError, float], None] = lambda error, delay: None,
    ) -> T:
        """Makes a request, and repeats it as long as it raises `TransientError`.

        `on_retry` is called before each wait with the failure and the wait [s].

        Raises:
            TransientError: The last one, if all repetitions failed or the server asks to wait
                for too long.
        """
        backoff = self.backoff
        for left in range(self.retries, -1, -1):
            try:
                return await request()
            except TransientError as error:
                if not left or error.wait > self.longest_wait:
                    raise
                jitter = random.uniform(0.5, 1)
                delay = max(error.wait, jitter * min(backoff, _LONGEST_BACKOFF))
                on_retry(error, delay)
                await asyncio.sleep(delay)
                backoff *= 2
        raise AssertionError("the last attempt returns or raises")


def is_transient(status: int) -> bool:
    """Returns whether a request that was answered with this HTTP status is worth repeating."""
    return status in (408, 409, 425, 429) or status >= 500


def retry_after(header: str | None) -> float:
    """Returns the seconds that a header `Retry-After` asks for: a number, or a date."""
    if not header:
        return 0.0
    if header.strip().isdecimal():
        return float(header)
    try:
        return max(0.0, parsedate_to_datetime(header).timestamp() - time.time())
    except ValueError:
        return 0.0
