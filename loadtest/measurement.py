"""Measurement of latency at a fixed arrival rate, and the HTTP client that sends the requests.

The load generator shares the machine with the service, so it must use little CPU time. At 1,000
requests per second, asyncio streams took 0.23 ms of CPU time per request, a protocol class on
httptools the same, geventhttpclient 0.27 ms (and sent requests up to 10 ms late), aiohttp twice
and httpx2 six times as much.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit

import numpy as np

# Delay after which a request counts as sent late; asyncio's timers have a resolution of 1 ms.
_LATE_MS = 5.0
# Idle connections are not reused after this time [s]: servers close them, uvicorn after 5 s.
_MAX_IDLE = 2.0

Send = Callable[[bytes], Awaitable[tuple[int, bytes]]]


class Client:
    """Sends requests to one server over persistent connections.

    `url` is `http://host:port`, optionally with a path that is prepended to all paths (else
    ValueError). There are at most `limit` connections. `timeout` is that of a request [s],
    including the wait for a free connection.
    """

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str] | None = None,
        limit: int = 1000,
        timeout: float = 10.0,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"{url} is not an address of the form http://host:port")
        self._address = parts.hostname, parts.port or 80
        self._prefix = parts.path.rstrip("/")
        every = {"Host": parts.netloc, **(headers or {}), "Content-Type": "application/json"}
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in every.items())
        self._timeout = timeout
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter, float]] = []
        self._permits = asyncio.Semaphore(limit)

    def message(self, method: str, path: str, body: bytes = b"") -> bytes:
        """Returns the bytes of a request with a JSON body."""
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    async def send(self, message: bytes) -> tuple[int, bytes]:
        """Sends a request made by `message`; returns the status and body of the response.

        TimeoutError if the response is not complete within the time-out; OSError if the connection
        is refused or broken, or the response has no length.
        """
        async with asyncio.timeout(self._timeout), self._permits:
            reader, writer = await self._connect()
            reusable = False
            try:
                writer.write(message)
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = head.partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0]
                body = await reader.readexactly(int(length))
                reusable = b"\r\nconnection: close" not in head
                return int(head.split(maxsplit=2)[1]), body
            except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as error:
                raise ConnectionError(f"broken response: {error}") from error
            finally:
                if reusable:
                    self._idle.append((reader, writer, time.monotonic()))
                else:
                    writer.close()

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *_: object) -> None:
        while self._idle:
            self._idle.pop()[1].close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while self._idle:
            reader, writer, since = self._idle.pop()
            if since > time.monotonic() - _MAX_IDLE and not reader.at_eof():
                return reader, writer
            writer.close()
        return await asyncio.open_connection(*self._address)


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


async def measure(send: Send, messages: Sequence[bytes], rate: float) -> Measurement:
    """Sends message i at i / rate seconds, regardless of outstanding responses (open loop).

    Latency counts from the scheduled time, so that a stall of the service affects all requests
    scheduled during it, even those that could not be sent. A closed loop would omit these
    requests ("coordinated omission").

    `messages` must not be empty; `rate` is in requests per second. `send` sends one message and
    returns status and body, as `Client.send`.
    """
    statuses: Counter[str] = Counter()
    latencies: list[float] = []
    lags: list[float] = []

    async def run(message: bytes, due: float) -> None:
        lags.append(time.perf_counter() - due)
        try:
            status = str((await send(message))[0])
        except TimeoutError:
            status = "timeout"
        except OSError:
            status = "connection"
        statuses[status] += 1
        if status.startswith("2"):
            latencies.append(time.perf_counter() - due)

    cpu = time.process_time()
    start = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for i, message in enumerate(messages):
            due = start + i / rate
            # Lets responses be read even if the schedule is late; timers may also fire early.
            await asyncio.sleep(0)
            while (remaining := due - time.perf_counter()) > 0:  # noqa: ASYNC110
                await asyncio.sleep(remaining)
            group.create_task(run(message, due))
    seconds = time.perf_counter() - start
    return Measurement(
        rate=rate,
        seconds=seconds,
        sent=len(messages),
        statuses=dict(sorted(statuses.items())),
        latency_ms=_quantiles_ms(latencies, 50, 90, 99),
        lag_ms=_quantiles_ms(lags, 50, 99),
        late=sum(1000 * lag > _LATE_MS for lag in lags),
        driver_cpu=(time.process_time() - cpu) / seconds,
    )


def _quantiles_ms(seconds: Sequence[float], *percents: int) -> dict[str, float]:
    """Returns nearest-rank quantiles and the maximum [ms]; empty without values."""
    if not seconds:
        return {}
    names = [*(f"p{percent}" for percent in percents), "max"]
    found = np.percentile(seconds, (*percents, 100), method="inverted_cdf")
    return {name: round(1000 * float(s), 3) for name, s in zip(names, found, strict=True)}
