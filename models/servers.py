"""Clients of servers of models and of search: proxies, addresses, keys. Requires httpx2."""

import re
from collections.abc import Callable
from typing import Any, TypeVar

import httpx2

from core.errors import CareError
from core.loopback import is_local

Client = TypeVar("Client", bound=httpx2.Client | httpx2.AsyncClient)


def http_client(kind: Callable[..., Client], url: str, **options: Any) -> Client:
    """Returns a client for one server, which follows no redirects.

    It follows the proxies of the environment, except to this machine (`core.loopback.is_local`).

    Args:
        kind: A client class of httpx2.
        url: Address of the server.
        options: Other arguments of the class.

    Raises:
        CareError: If the environment names a proxy that httpx2 cannot use.
    """
    # Certificates that the environment names are trusted on this machine too.
    options["verify"] = options.get("verify") or httpx2.create_ssl_context()
    try:
        return kind(trust_env=not is_local(url), follow_redirects=False, **options)
    except (ImportError, ValueError, httpx2.InvalidURL) as error:
        # Not quoted, because it can contain a password.
        message = (
            "HTTP_PROXY, HTTPS_PROXY or ALL_PROXY names a proxy that cannot be used: set it to "
            "http://host:port, install the package socksio for a SOCKS proxy, or unset it"
        )
        raise CareError(message, code="bad_proxy") from error


def route_url(base_url: str, route: str) -> str | None:
    """Returns the address of a route; None if the address of the server is not valid.

    Args:
        base_url: http or https, without user, query and fragment; with or without `/v1`.
        route: Such as "embeddings".
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
