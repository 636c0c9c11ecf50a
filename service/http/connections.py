"""The open connections: their number, their time-outs and the bytes that clients have not taken."""

import resource
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, get_args

from prometheus_client import Counter

from service.limits import Usage

# Files that the service opens besides connections: sockets that accept, a reload, Redis, Milvus and
# the log.
_SPARE_FILES = 64
_OPEN_FILES = next(path for path in map(Path, ("/proc/self/fd", "/dev/fd")) if path.is_dir())
_BACKLOG = 2048
# What a client must take of a response within the time-out [bytes], if it is that long.
_LEAST_TAKEN = 65_536

# Why the service ended a connection: too many connections, too many unsent bytes, a client that
# sent nothing, one that did not send the rest of its request, one that did not take its response,
# or the shutdown.
Ending = Literal["limit", "unsent", "idle", "receive", "send", "shutdown"]
ENDINGS = get_args(Ending)


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    connections: int
    header_bytes: int  # longest head of a request: request line and headers
    unsent_bytes: int  # of responses that wait for clients, of all connections
    client_timeout: float  # longest wait for a request's head, and for progress of a response [s]
    keep_alive: float  # longest wait for the next request of a connection [s]


class Closable(Protocol):
    """What `Connections` needs of a connection."""

    def overdue(self, now: float) -> Ending | None:
        """Returns why the connection must end now, if it must; `now` is a time of the loop [s]."""

    def end(self) -> None:
        """Closes the connection, and gives up what is unsent."""


class Connections:
    """All open connections of a server, within its limits.

    When a connection beyond the limit opens, the connection whose client the service has waited for
    longest ends: idle connections first. When a response takes the unsent bytes beyond their limit,
    the connection that has been sending for longest ends. A single response may exceed that limit.
    `endings` counts the connections that end, by reason.
    """

    def __init__(
        self,
        limits: ConnectionLimits,
        endings: Counter,
        count: Usage | None = None,
        unsent: Usage | None = None,
    ) -> None:
        self.limits = limits
        self.count = count or Usage()
        self.unsent = unsent or Usage()
        self._endings = endings
        for ending in ENDINGS:
            endings.labels(ending)
        self._open: set[Closable] = set()
        # Connections whose client is to send or to read, in the order in which the waits began.
        self._waiting: OrderedDict[Closable, None] = OrderedDict()
        self._sending: OrderedDict[Closable, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def add(self, connection: Closable) -> None:
        """Adds a connection, whose client is to send; another one ends if there are too many."""
        self._open.add(connection)
        self.count.add(1)
        if not self.count.allows(0, self.limits.connections):
            oldest = next(iter(self._waiting or self._sending), connection)
            self._end(oldest, "limit")
        if connection in self._open:
            self.wait_for(connection)

    def remove(self, connection: Closable) -> None:
        """Forgets a connection that has ended."""
        if connection in self._open:
            self._open.remove(connection)
            self.count.add(-1)
        self._waiting.pop(connection, None)
        self.sent(connection)

    def wait_for(self, connection: Closable) -> None:
        """Notes that the client of a connection is to send."""
        self._waiting[connection] = None

    def serve(self, connection: Closable) -> None:
        """Notes that the service has all that it needs of the client of a connection."""
        self._waiting.pop(connection, None)

    def sending(self, connection: Closable, size: int) -> None:
        """Notes that a client has not taken a message of `size` bytes at once."""
        self.unsent.add(size)
        self._sending[connection] = size
        most = self.limits.unsent_bytes
        while not self.unsent.allows(0, most) and len(self._sending) > 1:
            self._end(next(iter(self._sending)), "unsent")

    def sent(self, connection: Closable) -> None:
        """Notes that a client has taken the message in full, or never will."""
        self.unsent.add(-self._sending.pop(connection, 0))

    def sweep(self, now: float) -> None:
        """Ends the connections whose clients are overdue; `now` is a time of the loop [s].

        If all workers together have too many, it ends those that this one has beyond its part.
        """
        for connection in list(self._open):
            if ending := connection.overdue(now):
                self._end(connection, ending)
        while self._waiting and not self.count.allows(0, self.limits.connections):
            self._end(next(iter(self._waiting)), "limit")

    def end_all(self) -> None:
        """Ends all connections; their requests see that their clients have disconnected."""
        for connection in list(self._open):
            self._end(connection, "shutdown")

    def _end(self, connection: Closable, ending: Ending) -> None:
        self.remove(connection)
        self._endings.labels(ending).inc()
        connection.end()


class Progress:
    """Whether a client takes all of a response, or `_LEAST_TAKEN` bytes, within each time-out.

    `now` is a time of the loop [s]; `left` are the bytes that the client has not taken.
    """

    def __init__(self, now: float, left: int) -> None:
        self._since = now
        self._left = left

    def stalled(self, now: float, left: int, timeout: float) -> bool:
        """Returns whether the client has taken too little."""
        if self._left - left >= _LEAST_TAKEN:
            self._since, self._left = now, left
        return now - self._since >= timeout


def available_connections(most: int, reserved: int = 0) -> tuple[int, int]:
    """Returns how many connections can be open, at most `most`, and how many may wait for `accept`.

    `reserved` is the number of files that something else will open. Raises the soft limit of open
    files as far as needed and possible.
    """
    used = sum(1 for _ in _OPEN_FILES.iterdir()) + _SPARE_FILES + reserved
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = used + most + _BACKLOG
    files = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    free = max(2, files - used)
    # Connections that wait for `accept` may all be accepted before the first of them is refused.
    backlog = min(_BACKLOG, max(free - most, free // 4, 1))
    return min(most, free - backlog), backlog
