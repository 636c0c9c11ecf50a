"""The socket on which a process accepts connections."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from core.errors import CareError


class Listener:
    """A socket that is bound at once and listens later, when the index is loaded.

    Two processes can bind one address, but only one can listen on it, unless it is `shared`: then
    the kernel spreads connections over the sockets. Port 0 takes a free port. An address that is
    not available is a CareError.
    """

    def __init__(self, host: str, port: int, *, shared: bool = False) -> None:
        self._address = host, port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        with self._usable():
            self.socket.bind(self._address)

    @classmethod
    def group(cls, host: str, port: int, number: int) -> tuple[list["Listener"], socket.socket]:
        """Returns listeners that share an address, and the socket that keeps others from it.

        Services that share an address by `SO_REUSEPORT` do not notice each other. So a socket that
        does not share it shows whether one listens already, and the name of a Unix socket, which
        only one process can have, whether one is about to.
        """
        alone = cls(host, port)
        port = alone.socket.getsockname()[1]
        name = socket.socket(socket.AF_UNIX)
        with alone._usable():
            name.bind(f"\0care {host} {port}")
        alone.socket.close()
        return [cls(host, port, shared=True) for _ in range(number)], name

    @classmethod
    def of(cls, descriptor: int) -> "Listener":
        """Returns the listener of a bound socket that another process has made."""
        listener = cls.__new__(cls)
        listener.socket = socket.socket(fileno=descriptor)
        host, port = listener.socket.getsockname()[:2]
        listener._address = host, port
        return listener

    def listen(self, backlog: int) -> str:
        """Starts to listen; connections wait in the backlog. Returns the URL."""
        with self._usable():
            self.socket.listen(backlog)
        host, port = self.socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    @contextmanager
    def _usable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.socket.close()
            host, port = self._address
            message = f"is not available ({error.strerror}): set another CARE_HOST or CARE_PORT"
            raise CareError(
                f"{host}:{port} {message}", code="address_unavailable", host=host, port=port
            ) from error
