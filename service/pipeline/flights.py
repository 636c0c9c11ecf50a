"""Flights: the texts that the pipeline encodes, and the searches that wait for their vectors."""

import asyncio
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from search.fusion import ChannelResult
from search.task import SearchTask
from service.pipeline.batcher import Job


@dataclass(eq=False, slots=True, kw_only=True)
class Flight(Job):
    """A text to encode, the search for it, and the future of the result; shared by equal requests.

    Only the pipeline changes a flight once it is submitted.
    """

    task: SearchTask | None = None  # the search; None if the result is the vector of the text
    key: bytes = b""  # flights with equal keys are shared, unless the key is empty
    # The result, or the exception that took its place.
    result: "asyncio.Future[Any]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    overflow: bool = False  # whether another encoder has taken it; the result is then not cached
    waiters: int = 0  # number of requests that wait for the result
    admitted: int = 0  # tokens of the queue that it takes

    @property
    def needs_vector(self) -> bool:
        return self.task is None or self.task.needs_vector

    def abandon(self) -> None:
        """Ends the work for a result that no request waits for."""
        self.abandoned = True
        self.result.cancel()
        if self.task:
            self.task.abandoned = True
            lexical: Future[ChannelResult] | None = self.task.lexical
            if lexical:
                lexical.cancel()

    def outcome(self, vector: Any) -> Any:
        """Returns the result, or the exception that took the place of the vector.

        `vector` is that of the text, the exception that encoding raised, or None. With a server
        that ranks hits again, the result of its task is not complete yet.
        """
        task = self.task
        if task is None or (isinstance(vector, Exception) and task.query.mode != "hybrid"):
            return vector
        if task.by_server:
            return task.channels()
        return task.search()
