"""The server process: its socket, signals and shutdown."""

import gc
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn

from core.errors import CareError
from service.app import create_app
from service.bus_error import restart_on_bus_error
from service.logs import configure_logs
from service.settings import Settings


def serve(settings: Settings) -> None:
    """Runs the service until SIGINT or SIGTERM, which end the process with status 0.

    Raises:
        CareError: If a setting is wrong, or the encoder or the index cannot be loaded.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        # Uvicorn also raises the signal again once all requests have ended.
        signal.signal(number, lambda *_: sys.exit(0))
    configure_logs(settings.log_level)
    restart_on_bus_error()
    listener = Listener(settings.host, settings.port)
    app = create_app(settings)
    engine = app.state.service.engine
    try:
        config = uvicorn.Config(
            app,
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
        line = f"serving index '{settings.index}' on {listener.listen(config.backlog)}\n"
        server = DrainingServer(config, engine.drain, settings.drain_seconds, line)
        server.run(sockets=[listener.socket])
    finally:
        engine.stop()


class Listener:
    """A socket that is bound at once and listens later, when the index is loaded.

    Two processes can bind one address, but only one can listen on it.

    Raises:
        CareError: If the address is not available.
    """

    def __init__(self, host: str, port: int) -> None:
        self._address = host, port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with self._usable():
            self.socket.bind(self._address)

    def listen(self, backlog: int) -> str:
        """Starts to listen; connections wait in the backlog. Returns the URL.

        Raises:
            CareError: If the address is not available.
        """
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


class DrainingServer(uvicorn.Server):
    """Accepts requests for `drain_seconds` after the first signal, then completes those in flight.

    A second signal skips the wait; a third one, if it is SIGINT, aborts requests in flight.

    Args:
        config: Configuration of uvicorn.
        drain: Called at each signal.
        drain_seconds: How long to accept requests after the first signal [s].
        line: Printed on standard output once the service is ready and handles signals.
    """

    def __init__(
        self, config: uvicorn.Config, drain: Callable[[], None], drain_seconds: float, line: str
    ) -> None:
        super().__init__(config)
        self._drain = drain
        self._drain_seconds = drain_seconds
        self._line = line
        self._end_at: float | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to serve; uvicorn handles the signals by now."""
        await super().startup(sockets)
        if self.started:
            sys.stdout.write(self._line)
            sys.stdout.flush()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handles a signal."""
        self._drain()
        if self._end_at is None and self._drain_seconds:
            self._end_at = time.monotonic() + self._drain_seconds
        else:
            super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        """Returns whether to shut down; uvicorn calls this ten times a second."""
        self.should_exit |= self._end_at is not None and time.monotonic() >= self._end_at
        return await super().on_tick(counter)
