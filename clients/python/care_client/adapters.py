"""What the retrievers of the frameworks share."""

import asyncio
from typing import Any

from care_client.client import AsyncClient, Client
from care_client.models import HitResponse


class Clients:
    """A client for threads, and one for each event loop: connections belong to a loop.

    Args:
        url: As of `Client`, like the other arguments.
    """

    def __init__(self, url: str, **settings: Any) -> None:
        self._arguments = {"url": url, **settings}
        self.sync = Client(**self._arguments)
        self._by_loop: dict[asyncio.AbstractEventLoop, AsyncClient] = {}

    @property
    def of_loop(self) -> AsyncClient:
        """The client of the running event loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._by_loop:
            self._by_loop = {
                each: client for each, client in self._by_loop.items() if not each.is_closed()
            }
            self._by_loop[loop] = AsyncClient(**self._arguments)
        return self._by_loop[loop]


def metadata(hit: HitResponse, answerable: float | None = None) -> dict[str, Any]:
    """Returns the metadata of a hit's document, and the other fields of the hit.

    The fields of the hit, such as `title`, `score` and those of a newer service, replace metadata
    of the same name, and so does `answerable`.

    Args:
        hit: A hit.
        answerable: That of the response, for frameworks that return nothing but documents.
    """
    fields = hit.model_dump(exclude={"id", "text", "metadata"}, exclude_none=True)
    if answerable is not None:
        fields["answerable"] = answerable
    return {**(hit.metadata or {}), **fields}
