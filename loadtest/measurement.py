"""Measurement of latency at a fixed arrival rate, over HTTP.

The load generator shares the machine with the service, so it must use little CPU time: it sends
and receives on sockets itself. At three times the capacity, 1,600 requests per second, a request
takes 60 to 85 µs of it, with streams of asyncio 150 µs. aiohttp takes twice and httpx2 six times as
much as those.
"""

import select
import socket
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit

import numpy as np

# Delay after which a request counts as sent late; the schedule has a resolution of 1 ms.
_LATE_MS = 5.0
# Idle connections are not reused after this time [s]: servers close them, uvicorn after 5 s.
_MAX_IDLE = 2.0
# How often time-outs are looked for [s].
_LOOK_EVERY = 0.05
# Most bytes of a response that are received at once, and most events that are handled at once.
_RECEIVED = 1 << 16
_EVENTS = 64


class Target:
    """A server, and the requests that are sent to it.

    `url` is `http://host:port`, optionally with a path that is prepended to all paths (else
    ValueError).
    """

    def __init__(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"{url} is not an address of the form http://host:port")
        self.address = parts.hostname, parts.port or 80
        self._prefix = parts.path.rstrip("/")
        every = {"Host": parts.netloc, **(headers or {}), "Content-Type": "application/json"}
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in every.items())

    def message(self, method: str, path: str, body: bytes = b"") -> bytes:
        """Returns the bytes of a request with a JSON body."""
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


@dataclass(frozen=True)
class Measurement:
    """Results of requests that were scheduled at a constant rate."""

    rate: float  # scheduled requests per second
    seconds: float  # time from the first scheduled request to the last response
    sent: int  # number of requests
    statuses: dict[str, int]  # number of requests by status, including "timeout" and "connection"
    # p50, p90, p99 and max of requests with status 2xx, from the scheduled time (not from
    # sending) to the response; empty if there are none.
    latency_ms: dict[str, float]
    lag_ms: dict[str, float]  # p50, p99 and max of the delay between scheduled time and sending
    late: int  # number of requests sent more than 5 ms late
    driver_cpu: float  # CPU seconds of this process per second

    @property
    def succeeded(self) -> int:
        """Number of requests with status 2xx."""
        return sum(count for status, count in self.statuses.items() if status.startswith("2"))

    @property
    def goodput(self) -> float:
        """Requests with status 2xx per second."""
        return self.succeeded / self.seconds

    @property
    def error_rate(self) -> float:
        """Share of requests without status 2xx."""
        return 1 - self.succeeded / self.sent

    @property
    def kept_schedule(self) -> bool:
        """Whether the load generator sent requests on time, so that latencies are the service's.

        The p99 of its lag may be at most 5 ms or a tenth of the p99 latency.
        """
        return self.lag_ms["p99"] <= max(_LATE_MS, 0.1 * self.latency_ms.get("p99", 0.0))

    def within(self, bound_ms: float, max_error_rate: float) -> bool:
        """Returns whether the schedule was kept and p99 and error rate are within the bounds."""
        return (
            self.kept_schedule
            and self.error_rate <= max_error_rate
            and self.latency_ms.get("p99", float("inf")) <= bound_ms
        )

    def as_json(self) -> dict[str, Any]:
        """Returns the attributes and the properties derived from them."""
        computed = ("goodput", "error_rate", "kept_schedule")
        return asdict(self) | {name: getattr(self, name) for name in computed}


def measure(
    target: Target,
    messages: Sequence[bytes],
    rate: float,
    limit: int = 1000,
    timeout: float = 10.0,
) -> Measurement:
    """Sends message i at i / rate seconds, regardless of outstanding responses (open loop).

    Latency counts from the scheduled time, so that a stall of the service affects all requests
    scheduled during it, even those that could not be sent. A closed loop would omit these
    requests ("coordinated omission").

    `messages` must not be empty; `rate` is in requests per second. There are at most `limit`
    connections. `timeout` is that of a request [s], including the wait for a free connection.
    """
    lags: list[float] = []
    driver = _Driver(target, limit, timeout)
    cpu = time.process_time()
    start = time.perf_counter()
    try:
        while len(lags) < len(messages) or driver.is_busy:
            wait = _LOOK_EVERY
            while len(lags) < len(messages):
                due = start + len(lags) / rate
                if (wait := due - time.perf_counter()) > 0:
                    break
                message = messages[len(lags)]
                lags.append(time.perf_counter() - due)
                driver.send(message, due)
            driver.receive(min(max(wait, 0.0), _LOOK_EVERY))
    finally:
        driver.close()
    seconds = time.perf_counter() - start
    return Measurement(
        rate=rate,
        seconds=seconds,
        sent=len(messages),
        statuses=dict(sorted(driver.statuses.items())),
        latency_ms=_quantiles_ms(driver.latencies, 50, 90, 99),
        lag_ms=_quantiles_ms(lags, 50, 99),
        late=sum(1000 * lag > _LATE_MS for lag in lags),
        driver_cpu=(time.process_time() - cpu) / seconds,
    )


class _Connection:
    """A connection, and the request that it carries."""

    __slots__ = ("due", "received", "since", "socket", "unsent", "wakes")

    def __init__(self, opened: socket.socket) -> None:
        self.socket = opened
        self.since = 0.0  # when it got its request or, while it is idle, when that ended
        self.due = 0.0
        self.unsent = b""
        self.received = b""
        self.wakes = True  # whether it is an event that the socket takes more


class _Driver:
    """Sends requests over at most `limit` connections, and counts the responses."""

    def __init__(self, target: Target, limit: int, timeout: float) -> None:
        found = socket.getaddrinfo(*target.address, type=socket.SOCK_STREAM)
        self._family, self._address = found[0][0], found[0][4]
        self._limit = limit
        self._timeout = timeout
        self._events = select.epoll()
        # By descriptor.
        self._idle: dict[int, _Connection] = {}
        self._busy: dict[int, _Connection] = {}
        self._waiting: deque[tuple[bytes, float]] = deque()  # requests without a connection
        self._look_at = 0.0
        self.statuses: Counter[str] = Counter()
        self.latencies: list[float] = []

    @property
    def is_busy(self) -> bool:
        """Whether a response is missing."""
        return bool(self._busy or self._waiting)

    def send(self, message: bytes, due: float) -> None:
        """Sends a request as soon as there is a connection for it."""
        self._waiting.append((message, due))
        self._send_waiting()

    def receive(self, wait: float) -> None:
        """Waits for responses, at most some seconds, and counts those that are complete."""
        for descriptor, event in self._events.poll(wait, _EVENTS):
            if connection := self._idle.pop(descriptor, None):
                connection.socket.close()  # as the server has done
            elif (connection := self._busy.get(descriptor)) and event == select.EPOLLOUT:
                self._write(descriptor, connection)
            elif connection:
                self._read(descriptor, connection)
        if (now := time.perf_counter()) >= self._look_at:
            self._look_at = now + _LOOK_EVERY
            self._end_before(now - self._timeout)
        self._send_waiting()

    def close(self) -> None:
        """Closes all connections."""
        for connection in (*self._idle.values(), *self._busy.values()):
            connection.socket.close()
        self._events.close()

    def _end_before(self, due: float) -> None:
        """Ends the requests that were due before a time."""
        for descriptor in [each for each, found in self._busy.items() if found.due < due]:
            self._end(descriptor, "timeout")
        while self._waiting and self._waiting[0][1] < due:
            self._waiting.popleft()
            self.statuses["timeout"] += 1

    def _send_waiting(self) -> None:
        while self._waiting and (connection := self._connection()):
            connection.unsent, connection.due = self._waiting.popleft()
            connection.received = b""
            descriptor = connection.socket.fileno()
            self._busy[descriptor] = connection
            self._write(descriptor, connection)

    def _connection(self) -> _Connection | None:
        """Returns an idle connection; a new one if there is none, and the limit allows one."""
        while self._idle:
            connection = self._idle.popitem()[1]
            if time.perf_counter() - connection.since < _MAX_IDLE:
                return connection
            connection.socket.close()
        if len(self._busy) >= self._limit:
            return None
        opened = socket.socket(self._family, socket.SOCK_STREAM)
        opened.setblocking(False)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        opened.connect_ex(self._address)
        self._events.register(opened, select.EPOLLIN | select.EPOLLOUT)
        return _Connection(opened)

    def _write(self, descriptor: int, connection: _Connection) -> None:
        """Sends what the socket takes now; the rest follows when it takes more."""
        try:
            sent = connection.socket.send(connection.unsent)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._end(descriptor, "connection")
            return
        connection.unsent = connection.unsent[sent:]
        if connection.wakes != bool(connection.unsent):
            connection.wakes = bool(connection.unsent)
            wanted = select.EPOLLIN | (select.EPOLLOUT if connection.wakes else 0)
            self._events.modify(descriptor, wanted)

    def _read(self, descriptor: int, connection: _Connection) -> None:
        try:
            received = connection.socket.recv(_RECEIVED)
        except OSError:
            received = b""
        connection.received += received
        head, end, body = connection.received.partition(b"\r\n\r\n")
        if received and not end:
            return
        head = head.lower()
        try:
            status = str(int(head.split(maxsplit=2)[1]))
            length = int(head.partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0])
        except (ValueError, IndexError):  # a broken response, or one without length
            self._end(descriptor, "connection")
            return
        if len(body) >= length:
            self._end(descriptor, status, reusable=b"\r\nconnection: close" not in head)
        elif not received:
            self._end(descriptor, "connection")

    def _end(self, descriptor: int, status: str, *, reusable: bool = False) -> None:
        """Counts a request that has ended."""
        connection = self._busy.pop(descriptor)
        connection.since = time.perf_counter()
        self.statuses[status] += 1
        if status.startswith("2"):
            self.latencies.append(connection.since - connection.due)
        if reusable:
            self._idle[descriptor] = connection
        else:
            connection.socket.close()


def _quantiles_ms(seconds: Sequence[float], *percents: int) -> dict[str, float]:
    """Returns nearest-rank quantiles and the maximum [ms]; empty without values."""
    if not seconds:
        return {}
    names = [*(f"p{percent}" for percent in percents), "max"]
    found = np.percentile(seconds, (*percents, 100), method="inverted_cdf")
    return {name: round(1000 * float(s), 3) for name, s in zip(names, found, strict=True)}
