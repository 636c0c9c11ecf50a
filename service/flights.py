"""Flights: the texts that the pipeline encodes, and what is done with their vectors."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from core.types import Check, FloatArray
from service.batcher import Job
from service.search import Timed
from stores.base import Vectors


@dataclass(eq=False, slots=True, kw_only=True)
class Flight(Job):
    """A text to encode and what to do with its vector; shared by requests with equal keys.

    Some flights also, or only, do something without the vector.

    Only the pipeline changes a flight once it is submitted.

    Attributes:
        finish: Computes the result from the vector of the text, in a search thread; calls the
            check between its steps. It also gets the future of `beside`, what was found by
            `nearest`, or None, and with `with_tokens` the argument `tokens`: the token vectors of
            the text, or None.
        then: What is done with this result on the event loop, if anything: its result takes the
            place of the one of `finish`.
        nearest: Where to find rows for several flights of a batch at once, and how many.
        beside: What runs in a search thread at the same time as the encoder, if anything; calls the
            check between its steps. If encoding fails, `finish` gets the exception as the vector.
        encode: Whether the text is encoded; otherwise `finish` gets None.
        key: Flights with equal keys are shared, unless the key is empty.
        result: The result, or the exception that took its place.
        may_overflow: Whether another encoder may take it if the queue is full.
        overflow: Whether another encoder has taken it. The result is then not cached.
        waiters: Number of requests that wait for the result.
        admitted: Tokens of the queue that it takes.
        beside_future: The future of `beside`.
    """

    finish: Callable[..., Any]
    then: Callable[[Any], Awaitable[Any]] | None = None
    nearest: tuple[Vectors, int] | None = None
    beside: Callable[[Check], Any] | None = None
    encode: bool = True
    key: bytes = b""
    result: "asyncio.Future[Any]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    may_overflow: bool = False
    overflow: bool = False
    waiters: int = 0
    admitted: int = 0
    beside_future: "Future[Any] | None" = None

    def check(self) -> None:
        """Raises `AbandonedError` once no request waits for the result."""
        if self.abandoned:
            raise AbandonedError


class AbandonedError(Exception):
    """No request waits for a result any more."""


def result_of(flight: Flight, vector: Any, found: Timed | None) -> Any:
    """Returns the result of a flight, or the exception that took the place of its vector.

    Args:
        flight: The flight.
        vector: The vector of its text, the exception that encoding raised, or None.
        found: What `search_together` has found for it, if anything.
    """
    if isinstance(vector, Exception) and not flight.beside:
        return vector
    tokens = {"tokens": flight.token_vectors} if flight.with_tokens else {}
    return flight.finish(vector, flight.check, flight.beside_future, found, **tokens)


def search_together(
    flights: Sequence[Flight], vectors: FloatArray | Sequence[Any]
) -> dict[int, Timed]:
    """Searches for flights of a batch that search in the same way.

    Returns what is found, and the time of the search [s], by position in the batch.
    """
    found: dict[int, Timed] = {}
    if not isinstance(vectors, np.ndarray):
        return found
    groups = defaultdict(list)
    for i, flight in enumerate(flights):
        if flight.nearest and not flight.abandoned:
            groups[flight.nearest].append(i)
    for (index, k), members in groups.items():
        # If a search fails, each flight searches by itself and gets its own error.
        with suppress(Exception):
            started = time.perf_counter()
            if len(members) > 1 and (hits := index.search_together(vectors[members], k)):
                spent = time.perf_counter() - started
                found |= {i: (rows, spent) for i, rows in zip(members, hits, strict=True)}
    return found
