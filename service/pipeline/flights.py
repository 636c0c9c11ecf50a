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

    Attributes:
        task: The search; None if the result is the vector of the text.
        key: Flights with equal keys are shared, unless the key is empty.
        result: The result, or the exception that took its place.
        overflow: Whether another encoder has taken it. The result is then not cached.
        waiters: Number of requests that wait for the result.
        admitted: Tokens of the queue that it takes.
    """

    task: SearchTask | None = None
    key: bytes = b""
    result: "asyncio.Future[Any]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    overflow: bool = False
    waiters: int = 0
    admitted: int = 0

    @property
    def needs_vector(self) -> bool:
        """Whether the text has to be encoded."""
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

        With a server that ranks hits again, the result of its task is not complete yet.

        Args:
            vector: The vector of the text, the exception that encoding raised, or None.
        """
        task = self.task
        if task is None or (isinstance(vector, Exception) and task.query.mode != "hybrid"):
            return vector
        if task.by_server:
            return task.channels()
        return task.search()
