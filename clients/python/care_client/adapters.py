"""What the retrievers of the frameworks share."""

from typing import Any

from care_client.async_client import AsyncClient
from care_client.client import Client
from care_client.models import HitResponse


class Clients:
    """A client for threads, and one for event loops.

    Args:
        url: As of `Client`, like the other arguments.
    """

    def __init__(self, url: str, **settings: Any) -> None:
        self.sync = Client(url, **settings)
        self.loops = AsyncClient(url, **settings)


def metadata(hit: HitResponse, answerable: float | None = None) -> dict[str, Any]:
    """Returns the metadata of a hit's document, and the other fields of the hit.

    The fields of the hit, such as `title`, `score` and those of a newer service, replace metadata
    of the same name, and so does `answerable`.

    Args:
        hit: A hit.
        answerable: That of the response, for frameworks that return nothing but documents.
    """
    return {**(hit.metadata or {}), **_fields(hit, answerable)}


def search_fields(hit: HitResponse, answerable: float | None = None) -> list[str]:
    """Returns the names in `metadata` that describe the search, not the document."""
    return [name for name in _fields(hit, answerable) if name != "title"]


def _fields(hit: HitResponse, answerable: float | None) -> dict[str, Any]:
    fields = hit.model_dump(exclude={"id", "text", "metadata"}, exclude_none=True)
    if answerable is not None:
        fields["answerable"] = answerable
    return fields
