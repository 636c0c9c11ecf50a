"""Retries of requests to servers; one policy for all clients."""

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
    """A failure after which the request may be retried.

    Attributes:
        reason: Description of the failure.
        wait: Minimum time until the retry [s].
    """

    def __init__(self, reason: str, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.reason = reason
        self.wait = wait


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential backoff with jitter."""

    retries: int = 6  # maximum number of retries of a request
    backoff: float = 1.0  # maximum wait before the first retry, doubled for each further retry [s]
    longest_wait: float = 300.0  # the request fails if the server requests a longer wait [s]

    async def run(
        self,
        request: Callable[[], Awaitable[T]],
        on_retry: Callable[[TransientError, float], None] = lambda error, delay: None,
    ) -> T:
        """Makes a request, and retries it while it raises `TransientError`.

        Args:
            request: Makes the request.
            on_retry: Called before each wait with the failure and the wait [s].

        Raises:
            TransientError: The last one, if all retries failed or the server requests a wait of
                more than `longest_wait`.
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
    """Returns whether a request may be retried after a response with this HTTP status."""
    return status in (408, 409, 425, 429) or status >= 500


def is_rejection(status: int) -> bool:
    """Returns whether a status rejects the content of a request, such as too long a text.

    The server may accept other requests, which after the other statuses it does not.
    """
    return status in (400, 413, 422)


def retry_after(header: str | None) -> float:
    """Returns the wait in a `Retry-After` header, which is a number or a date [s]; 0 without."""
    if not header:
        return 0.0
    if header.strip().isdecimal():
        return float(header)
    try:
        return max(0.0, parsedate_to_datetime(header).timestamp() - time.time())
    except ValueError:
        return 0.0
