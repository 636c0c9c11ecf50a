"""Addresses and keys of servers with OpenAI's or Cohere's routes. Requires httpx2."""

import re

import httpx2


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
