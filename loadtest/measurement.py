"""Latency at a fixed arrival rate, and the HTTP client that sends the requests.

The driver shares the machine with what it measures, so its own work must be small: at 1,000
requests per second asyncio's streams took 0.23 ms of processor time for one, a protocol class over
httptools as much, geventhttpclient 0.27 (and requests left up to 10 ms late), aiohttp and httpx2
two and six times as much.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit

import numpy as np

# asyncio's timers have a grain of 1 ms; a request that leaves later than this was held up.
_LATE_MS = 5.0
# Servers close connections after 5 s without a request (uvicorn's default) or later. An older
# connection is not used again: the server may be closing it.
_MAX_IDLE = 2.0

Send = Callable[[bytes], Awaitable[tuple[int, bytes]]]


class Client:
    """Sends requests to one server over at most `limit` persistent connections.

    The address, `http://host:port`, may have a path to prefix every other. The timeout [s] of a
    request includes its wait for a free connection.
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
            raise ValueError(f"{url} is not an http:// address")
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
        """Sends what `message` made; returns the status and body of the response.

        Raises `TimeoutError` if no whole response comes in time, `OSError` if the connection is
        refused or broken, or the response has no length.
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
    """The outcome of requests that were due at a constant rate.

    Attributes:
        rate: Requests that were due per second.
        seconds: From when the first was due to the last response.
        statuses: Requests by status, "timeout" and "connection" among them; `sent` are all.
        latency_ms: p50, p90, p99 and max of the requests answered with 2xx, each counted from
            when it was due, not from when it left; empty without such answers.
        lag_ms: p50, p99 and max of how long after they were due requests left.
        late: Requests that left more than 5 ms after they were due.
        driver_cpu: Processor seconds of this process per second.
    """

    rate: float
    seconds: float
    sent: int
    statuses: dict[str, int]
    latency_ms: dict[str, float]
    lag_ms: dict[str, float]
    late: int
    driver_cpu: float

    @property
    def good(self) -> int:
        """Requests that were answered with 2xx."""
        return sum(count for status, count in self.statuses.items() if status.startswith("2"))

    @property
    def goodput(self) -> float:
        """Requests answered with 2xx per second."""
        return self.good / self.seconds

    @property
    def error_rate(self) -> float:
        """Share of requests that were not answered with 2xx."""
        return 1 - self.good / self.sent

    @property
    def kept_schedule(self) -> bool:
        """Whether the latencies are the service's, and not those of a driver that fell behind.

        They include the driver's lag. Its p99 may be 5 ms, or a tenth of the p99 latency.
        """
        return self.lag_ms["p99"] <= max(_LATE_MS, 0.1 * self.latency_ms.get("p99", 0.0))

    def within(self, bound_ms: float, max_error_rate: float) -> bool:
        """Whether the driver kept its schedule and p99 and errors are within their bounds."""
        return (
            self.kept_schedule
            and self.error_rate <= max_error_rate
            and self.latency_ms.get("p99", float("inf")) <= bound_ms
        )

    def as_json(self) -> dict[str, Any]:
        """Returns the attributes and what is computed from them."""
        computed = ("goodput", "error_rate", "kept_schedule")
        return asdict(self) | {name: getattr(self, name) for name in computed}


async def measure(send: Send, messages: Sequence[bytes], rate: float) -> Measurement:
    """Sends message i at i / rate seconds, whether or not those before it are answered.

    The schedule is fixed before the first leaves. Latency counts from it, so that a stall counts
    for every request that was due in it, also for those that could not leave: without this, a
    driver that waits with the service would leave them out ("coordinated omission"). At least one
    message is needed; the last response is waited for.
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
            # Responses are read even when the driver is behind; timers may fire early.
            await asyncio.sleep(0)
            while (left := due - time.perf_counter()) > 0:  # noqa: ASYNC110
                await asyncio.sleep(left)
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
    """Returns nearest-rank quantiles and the maximum [ms]; empty of nothing."""
    if not seconds:
        return {}
    names = [*(f"p{percent}" for percent in percents), "max"]
    found = np.percentile(seconds, (*percents, 100), method="inverted_cdf")
    return {name: round(1000 * float(s), 3) for name, s in zip(names, found, strict=True)}
