"""The HTTP clients under a client of the service: whose connections they are, and when they end."""

import asyncio
import ipaddress
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

import httpx2

from care_client.errors import CareClientError

H = TypeVar("H", httpx2.Client, httpx2.AsyncClient)
Loop = asyncio.AbstractEventLoop | None

# When the call of this thread ends, in the time of `time.monotonic`.
_end: ContextVar[float] = ContextVar("_end")
# Bytes after which a write looks at the time again.
_PIECE = 65_536


class _Connections(ABC, Generic[H]):
    """An HTTP client for each owner: a process, or an event loop in a process.

    A forked process has the sockets of its parent, and those of a loop fail in another one. What
    is pickled or copied are the arguments.

    Args:
        url: Address of the service.
        given: The caller's HTTP client, to be used in place of those made here.
    """

    def __init__(self, url: str, given: H | None = None) -> None:
        self._url = url
        self._given: H | None = given
        self._open: dict[tuple[int, Loop], H] = {}
        self._closed = False

    def __reduce__(self) -> tuple[Any, ...]:
        if self._given is not None:
            raise _not_shareable()
        return type(self), (self._url,)

    @abstractmethod
    def _make(self) -> H:
        """Returns a new HTTP client."""

    def _of(self, loop: Loop) -> H:
        """Returns the HTTP client of this process and a loop; CareClientError if there is none."""
        if self._closed:
            raise CareClientError("the client is closed: make a new one", code="client_closed")
        owner = os.getpid(), loop
        http = self._open.get(owner)
        if http is None:
            if self._given is not None and self._open:
                raise _not_shareable()
            for other in self._others(owner):
                # Not closed: its lock may have been held when the process was forked.
                self._open.pop(other, None)
            http = self._open.setdefault(owner, self._given or self._made())
        return http

    def _ended(self) -> list[tuple[Loop, H]]:
        """Ends the use of all HTTP clients; returns those to close, and their loops."""
        self._closed = True
        if self._given is not None and not self._open:
            return [(None, self._given)]
        here = os.getpid()
        return [(loop, http) for (process, loop), http in self._open.items() if process == here]

    def _others(self, owner: tuple[int, Loop]) -> list[tuple[int, Loop]]:
        """Returns the owners that are another process or a closed loop."""
        return [
            (process, loop)
            for process, loop in list(self._open)
            if process != owner[0] or (loop and loop.is_closed())
        ]

    def _made(self) -> H:
        try:
            return self._make()
        except Exception as error:
            # Not chained, because httpx2 quotes the address of a proxy with its password.
            message = (
                f"no connection can be made as the environment says ({type(error).__name__}): "
                "check HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, SSL_CERT_FILE and SSL_CERT_DIR; a SOCKS "
                "proxy needs pip install 'httpx2[socks]'"
            )
            raise CareClientError(message, code="invalid_environment") from None


class Connections(_Connections[httpx2.Client]):
    """An HTTP client for each process, whose connections end with the time of `until`."""

    def http(self) -> httpx2.Client:
        """Returns the HTTP client of this process."""
        return self._of(None)

    def close(self) -> None:
        """Closes all connections."""
        for _, http in self._ended():
            http.close()

    def _make(self) -> httpx2.Client:
        local = is_loopback(self._url)
        http = httpx2.Client(transport=httpx2.HTTPTransport() if local else None)
        # httpx2 limits each read and write alone, and takes no backend.
        for transport in (http._transport, *http._mounts.values()):
            if isinstance(transport, httpx2.HTTPTransport):
                pool: Any = transport._pool
                pool._network_backend = _Backend(pool._network_backend)
        return http


class AsyncConnections(_Connections[httpx2.AsyncClient]):
    """An HTTP client for each event loop of each process."""

    def http(self) -> httpx2.AsyncClient:
        """Returns the HTTP client of the event loop that runs."""
        return self._of(asyncio.get_running_loop())

    async def close(self) -> None:
        """Closes all connections, those of other loops in these loops."""
        here = asyncio.get_running_loop()
        for loop, http in self._ended():
            if loop in (here, None):
                await http.aclose()
            elif loop.is_running():
                asyncio.run_coroutine_threadsafe(http.aclose(), loop)

    def _make(self) -> httpx2.AsyncClient:
        local = is_loopback(self._url)
        return httpx2.AsyncClient(transport=httpx2.AsyncHTTPTransport() if local else None)


@contextmanager
def until(end: float) -> Iterator[None]:
    """Ends what this thread reads and writes through an HTTP client of `Connections` at a time."""
    token = _end.set(end)
    try:
        yield
    finally:
        _end.reset(token)


def async_until(end: float) -> asyncio.Timeout:
    """Cancels what this task waits for at a time."""
    return asyncio.timeout(end - time.monotonic())


def is_loopback(url: str) -> bool:
    """Returns whether an address is this machine itself, so that no proxy can reach it."""
    host = httpx2.URL(url).host.rstrip(".")
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


class _Stream:
    """A network stream of httpx2 that ends with the time of `until`."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        part: bytes = self._stream.read(max_bytes, _left(timeout))
        return part

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        for start in range(0, len(buffer), _PIECE):
            self._stream.write(buffer[start : start + _PIECE], _left(timeout))

    def start_tls(
        self, ssl_context: Any, server_hostname: str | None = None, timeout: float | None = None
    ) -> "_Stream":
        return _Stream(self._stream.start_tls(ssl_context, server_hostname, _left(timeout)))


class _Backend:
    """What httpx2 opens connections with, for streams that end with the time of `until`."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def connect_tcp(self, *args: Any, **options: Any) -> _Stream:
        return _Stream(self._backend.connect_tcp(*args, **options))


def _left(timeout: float | None) -> float:
    left = _end.get() - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left if timeout is None else min(left, timeout)


def _not_shareable() -> CareClientError:
    message = (
        "a client with an HTTP client of your own (`http`) cannot be copied, or used in a forked "
        "process or another event loop: make one there"
    )
    return CareClientError(message, code="http_not_shareable")
