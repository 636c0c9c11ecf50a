"""A server of bytes: a test decides what each connection gets."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

ANSWER = b'{"hits": [{"id": "1", "score": 0.9, "rank": 1}]}'
Respond = Callable[[socket.socket], None]


@dataclass
class Server:
    """A server on 127.0.0.1.

    Attributes:
        port: Its port.
        heads: The heads of the requests of each connection, in the order of the connections.
        ended: Set when the server ends.
    """

    port: int
    heads: list[list[bytes]] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"


def head(length: int | None = None) -> bytes:
    """The head of a response with status 200."""
    size = "" if length is None else f"Content-Length: {length}\r\n"
    return f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n{size}\r\n".encode()


def answer(connection: socket.socket) -> None:
    """Sends the answer of a search."""
    connection.sendall(head(len(ANSWER)) + ANSWER)


@contextmanager
def serving(respond: Respond | None = None) -> Iterator[Server]:
    """Runs a server whose requests get what `respond` sends, by default the answer of a search."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = Server(listener.getsockname()[1])
        threads: list[threading.Thread] = []
        connections: list[socket.socket] = []

        def serve(connection: socket.socket, heads: list[bytes]) -> None:
            with connection, suppress(OSError):
                while request := _request(connection):
                    heads.append(request)
                    (respond or answer)(connection)

        def accept() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    connections.append(connection)
                    heads: list[bytes] = []
                    server.heads.append(heads)
                    threads.append(threading.Thread(target=serve, args=(connection, heads)))
                    threads[-1].start()

        accepting = threading.Thread(target=accept)
        accepting.start()
        try:
            yield server
        finally:
            server.ended.set()
            for each in [listener, *connections]:
                with suppress(OSError):  # that of a closed connection
                    each.shutdown(socket.SHUT_RDWR)
            for thread in [accepting, *threads]:
                thread.join(10)


def _request(connection: socket.socket) -> bytes:
    """Returns the head of the next request, after its body; b"" at the end of the connection."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += (part := connection.recv(65_536))
        if not part:
            return b""
    head_, _, body = received.partition(b"\r\n\r\n")
    fields = dict(line.lower().split(b": ", 1) for line in head_.split(b"\r\n")[1:])
    length = int(fields.get(b"content-length", 0)) - len(body)
    while length > 0:
        length -= len(connection.recv(length))
    return head_
