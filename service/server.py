"""The server process: its socket, signals and shutdown."""

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from service.app import create_app
from service.bus_error import restart_on_bus_error
from service.errors import RequestError
from service.http.connections import ConnectionLimits, Connections, available_connections
from service.http.context import RequestContext
from service.http.cors import Cors
from service.http.listener import Listener
from service.http.problems import problem_response
from service.http.protocol import HttpProtocol
from service.limits import Limits, Usages
from service.observe.logs import configure_logs
from service.observe.metrics import Metrics
from service.settings import Settings, warn_of_settings
from service.writer_process import WriterProcess

_LOG = logging.getLogger("care.service")
# From the end of the drain time: when connections end that clients keep open, when uvicorn cancels
# their requests, and when the process ends although a thread is busy [s].
_END_CONNECTIONS = 6.0
_CANCEL_REQUESTS = 7
_END_PROCESS = 9.0
# Sockets that accept connections from the one queue. The event loop accepts one connection of each
# in a turn, and beside 800 busy connections a turn takes some 10 ms.
_ACCEPTING = 16
# How long a thread that has encoded a batch waits at most for the interpreter, while the event loop
# works on other requests [s]. With Python's 5 ms the throughput is some 5 % lower.
_SWITCH_THREADS = 0.001


def serve(settings: Settings, announce: Callable[[str], None]) -> None:
    """Runs the service in this process until SIGINT or SIGTERM, which end it with status 0.

    `announce` gets the URL once the service accepts connections and handles signals.
    """
    set_up_process(settings)
    restart_on_bus_error()
    listener = Listener(settings.host, settings.port)
    warn_of_settings(settings)
    with WriterProcess() as writer:
        app = create_app(settings, writer=writer.path)
        run(app, listener, announce, beside=writer.run)


def set_up_process(settings: Settings) -> None:
    """Sets up signals, logs and threads of a process that serves."""
    for number in (signal.SIGINT, signal.SIGTERM):
        # Uvicorn also raises the signal again once all requests have ended.
        signal.signal(number, lambda *_: sys.exit(0))
    configure_logs(settings.log_level)
    sys.setswitchinterval(_SWITCH_THREADS)


def run(
    app: FastAPI,
    listener: Listener,
    ready: Callable[[str], None],
    beside: Callable[[], Coroutine[Any, Any, None]] | None = None,
) -> None:
    """Runs an application of `create_app` until a signal; `ready` gets the URL once it serves.

    `beside` runs in the event loop meanwhile.
    """
    engine, catalog = app.state.service.engine, app.state.service.catalog
    settings = engine.settings
    deadline = threading.Timer(_END_PROCESS, _end_process)
    deadline.daemon = True
    try:
        most, backlog = available_connections(engine.limits.connections, catalog.budget.descriptors)
        limits = replace(engine.limits, connections=most)
        connections = make_connections(settings, limits, engine.metrics, engine.usages)
        config = uvicorn.Config(
            app,
            http=http_protocol(connections, engine.metrics, settings.cors_origins),
            ws="none",
            backlog=backlog,
            timeout_graceful_shutdown=_CANCEL_REQUESTS,
            root_path=settings.root_path,
            log_config=None,
            log_level=settings.log_level,
            access_log=False,
            server_header=False,
            proxy_headers=False,
        )
        # Objects that live as long as the process are excluded from garbage collections.
        gc.collect()
        gc.freeze()
        url = listener.listen(config.backlog)
        drain = engine.drain, settings.drain_seconds
        server = DrainingServer(config, connections, *drain, partial(ready, url), deadline, beside)
        others = [listener.socket.dup() for _ in range(_ACCEPTING - 1)]
        server.run(sockets=[listener.socket, *others])
    finally:
        # Afterwards the interpreter waits for threads. If one is busy, the timer ends the process.
        catalog.stop()


def make_connections(
    settings: Settings, limits: Limits, metrics: Metrics, usages: Usages | None = None
) -> Connections:
    """Returns the open connections, none yet, with their limits and metrics."""
    usages = usages or Usages()
    of_connections = ConnectionLimits(
        connections=limits.connections,
        header_bytes=settings.max_header_bytes,
        unsent_bytes=limits.unsent_bytes,
        client_timeout=settings.client_timeout_seconds,
        keep_alive=settings.keep_alive_seconds,
    )
    shared = usages.connections, usages.unsent_bytes
    connections = Connections(of_connections, metrics.ended_connections, *shared)
    metrics.follow(metrics.connections, lambda: len(connections))
    metrics.follow(metrics.unsent_bytes, lambda: connections.unsent.own)
    return connections


def http_protocol(connections: Connections, metrics: Metrics, origins: Sequence[str] = ()) -> Any:
    """Returns what makes the protocol of each connection, for uvicorn.

    Refused requests get an id, a log line, metrics and the headers for pages of other origins like
    all others.
    """
    cors = Cors(origins)

    def refuse(error: RequestError) -> ASGIApp:
        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            await problem_response(error, scope)(scope, receive, send)

        return RequestContext(answer, metrics, None, cors)

    return partial(HttpProtocol, connections=connections, refuse=refuse)


class DrainingServer(uvicorn.Server):
    """Accepts requests for `drain_seconds` after the first signal, then completes those in flight.

    A second signal skips the wait; a third one, if it is SIGINT, aborts requests in flight. After
    the wait, connections that are still open after 6 s end, with their requests.

    `drain` is called at each signal, `ready` once the service accepts connections and handles
    signals; `deadline` is started after the wait. `beside` runs from the start to the end.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        connections: Connections,
        drain: Callable[[], None],
        drain_seconds: float,
        ready: Callable[[], None],
        deadline: threading.Timer,
        beside: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        super().__init__(config)
        self._connections = connections
        self._drain = drain
        self._drain_seconds = drain_seconds
        self._ready = ready
        self._end_at: float | None = None
        self._deadline = deadline
        self._beside = beside
        self._task: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to serve; uvicorn handles the signals by now."""
        if self._beside:
            self._task = asyncio.get_running_loop().create_task(self._beside())
        await super().startup(sockets)
        if self.started:
            self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._drain()
        if self._end_at is None and self._drain_seconds:
            self._end_at = time.monotonic() + self._drain_seconds
        else:
            super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        """Returns whether to shut down; uvicorn calls this ten times a second."""
        if counter % 10 == 0:
            self._connections.sweep(asyncio.get_running_loop().time())
        self.should_exit |= self._end_at is not None and time.monotonic() >= self._end_at
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Completes the requests in flight; aborts those that take longer than 6 s."""
        self._deadline.start()
        ending = asyncio.get_running_loop().call_later(_END_CONNECTIONS, self._connections.end_all)
        await super().shutdown(sockets)
        ending.cancel()
        if self._task:
            self._task.cancel()


def _end_process() -> None:
    _LOG.error("a thread did not end in time: the process ends without it")
    os._exit(0)
