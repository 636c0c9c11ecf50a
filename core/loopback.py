"""Addresses of this machine, and requests to them: these never pass through a proxy."""

import ipaddress
import socket
import urllib.request
from typing import Any
from urllib.parse import urlsplit


def is_loopback(host: str) -> bool:
    """Returns whether a host is reached from this machine only; names are not resolved."""
    name = host.lower().rstrip(".")
    address = _address(name)
    return address.is_loopback if address else name == "localhost" or name.endswith(".localhost")


def is_local(url: str) -> bool:
    """Returns whether a client that opens an address connects to this machine.

    Such a request must not follow `HTTP_PROXY`, `ALL_PROXY` and the like, whatever `NO_PROXY` says:
    a proxy on another machine would see the request, and cannot reach the server.
    """
    try:
        host = urlsplit(url).hostname or ""
    except ValueError:
        return False
    address = _address(host)
    return is_loopback(host) or bool(address and address.is_unspecified)


def open_local(request: urllib.request.Request | str, timeout: float) -> Any:
    """Opens an address of this machine as `urllib.request.urlopen` does, but without a proxy."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return opener.open(request, timeout=timeout)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Returns the number that a host is written as, also in short forms such as 127.1."""
    try:
        if ":" not in host:
            return ipaddress.IPv4Address(socket.inet_aton(host))
        address = ipaddress.IPv6Address(host)
    except (OSError, ValueError):
        return None
    return address.ipv4_mapped or address
