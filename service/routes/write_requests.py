"""What all requests that write share."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Request

from service.access.guards import get_state
from service.errors import RequestError
from service.writes import Writes


@asynccontextmanager
async def before_deadline(deadline: float) -> AsyncIterator[None]:
    """Raises `RequestError` if the block does not end before a time of the event loop [s].

    Whether its client disconnects or not: the write goes on, and is served then.
    """
    try:
        async with asyncio.timeout_at(deadline):
            yield
    except TimeoutError as error:
        message = "the deadline passed before the changes were served; they can still be made"
        raise RequestError("deadline_exceeded", message) from error


def writes_of(request: Request) -> Writes:
    """Returns what sends writes; RequestError if the service has no writer process."""
    writes = get_state(request).writes
    if writes is None:
        message = "this service has no process that writes documents"
        raise RequestError("writer_unavailable", message)
    return writes
