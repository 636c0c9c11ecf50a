"""Clients of servers of models and of search: proxies, addresses, keys, limits. Requires httpx2."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, TypeVar

import httpx2

from core.errors import CareError
from core.loopback import is_local

_CONNECTIONS = 32

Client = TypeVar("Client", bound=httpx2.Client | httpx2.AsyncClient)


class BadResponseError(httpx2.RequestError):
    """What is wrong with a response, without its content."""


class TooLongError(BadResponseError):
    """A response is longer than any that is expected."""


def http_client(kind: Callable[..., Client], url: str, **options: Any) -> Client:
    """Returns a client for one server, which follows no redirects and asks for no compression.

    It follows the proxies of the environment, except to this machine (`core.loopback.is_local`).
    It has no time-out of its own: `post` has one.
    """
    # Certificates that the environment names are trusted on this machine too.
    options["verify"] = options.get("verify") or httpx2.create_ssl_context()
    options["headers"] = {**options.get("headers", {}), "Accept-Encoding": "identity"}
    options.setdefault("timeout", None)
    try:
        return kind(trust_env=not is_local(url), follow_redirects=False, **options)
    except (ImportError, ValueError, httpx2.InvalidURL) as error:
        # Not quoted, because it can contain a password.
        message = (
            "HTTP_PROXY, HTTPS_PROXY or ALL_PROXY names a proxy that cannot be used: set it to "
            "http://host:port, install the package socksio for a SOCKS proxy, or unset it"
        )
        raise CareError(message, code="bad_proxy") from error


def client_of(setting: str, url: str, key: str, route: str) -> tuple[str, httpx2.AsyncClient]:
    """Returns the address of a route and a client of the server of a service's settings.

    `setting` is the beginning of the names of both settings, such as `CARE_CHAT`.
    """
    address, headers = route_url(url, route), authorization(key)
    if address is None:
        # Not quoted, because it can contain a password.
        message = f"{setting}_URL is not an address such as http://host:8080/v1"
        raise CareError(message, code="invalid_setting", name=f"{setting}_URL")
    if headers is None:
        message = f"{setting}_KEY contains spaces or is not ASCII"
        raise CareError(message, code="invalid_setting", name=f"{setting}_KEY")
    limits = httpx2.Limits(max_connections=_CONNECTIONS)
    return address, http_client(httpx2.AsyncClient, address, headers=headers, limits=limits)


async def post(
    client: httpx2.AsyncClient,
    url: str,
    body: Mapping[str, Any],
    *,
    seconds: float,
    limit: int,
    errors: bool = False,
) -> httpx2.Response:
    """Sends JSON and returns the response; no exception quotes the one or the other.

    Args:
        seconds: Time-out of the whole call: connecting, and head and body of the response [s].
        limit: Most bytes of the body, `content`.
        errors: Whether to read the body of a response with a status other than 200 too.

    Raises:
        TimeoutError: If the response is not complete in time.
        TooLongError: If its body has more bytes than `limit`.
        httpx2.RequestError: If the connection fails.
    """
    async with asyncio.timeout(seconds), client.stream("POST", url, json=body) as response:
        if errors or response.status_code == 200:
            await limit_body(limit, response)
            await response.aread()
    return response


async def limit_body(limit: int, response: httpx2.Response) -> None:
    """Lets the reading of a body with more bytes than `limit` raise `TooLongError`.

    A compressed body stays as it is: it would have no bound in memory. With a limit this is an
    event hook for responses.
    """
    response.headers.pop("Content-Encoding", None)
    assert isinstance(response.stream, httpx2.AsyncByteStream)
    response.stream = _Limited(limit, response.stream)


class _Limited(httpx2.AsyncByteStream):
    def __init__(self, limit: int, body: httpx2.AsyncByteStream) -> None:
        self._limit, self._body = limit, body

    async def __aiter__(self) -> AsyncIterator[bytes]:
        read = 0
        async for piece in self._body:
            read += len(piece)
            if read > self._limit:
                raise TooLongError(f"more than {self._limit} bytes")
            yield piece

    async def aclose(self) -> None:
        await self._body.aclose()


def route_url(base_url: str, route: str) -> str | None:
    """Returns the address of a route such as "embeddings", or None if `base_url` is not valid.

    `base_url` is http or https, without user, query and fragment; with or without `/v1`.
    """
    try:
        url = httpx2.URL(base_url)
    except httpx2.InvalidURL:
        return None
    plain = not (url.userinfo or url.query or url.fragment)
    if url.scheme not in ("http", "https") or not url.host or not plain:
        return None
    root = str(url).rstrip("/")
    return f"{root}/{route}" if re.search(r"/v\d+$", root) else f"{root}/v1/{route}"


def authorization(api_key: str) -> dict[str, str] | None:
    """Returns the header of a key, none for ""; None if the key has spaces or is not ASCII."""
    if not api_key:
        return {}
    if not re.fullmatch(r"[!-~]+", api_key):
        return None
    return {"Authorization": f"Bearer {api_key}"}
