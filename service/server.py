"""The process that serves: its socket, its signals, its end."""

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
from service.logs import configure_logs
from service.settings import Settings


def serve(settings: Settings) -> None:
    """Serves until SIGINT or SIGTERM ends the process with status 0."""
    for number in (signal.SIGINT, signal.SIGTERM):
        # Uvicorn calls it as well, once the requests in work are answered.
        signal.signal(number, lambda *_: sys.exit(0))
    configure_logs(settings.log_level)
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
        # What lives as long as the process need not be looked through by each collection.
        gc.collect()
        gc.freeze()
        line = f"serving index '{settings.index}' on {listener.listen(config.backlog)}\n"
        server = DrainingServer(config, engine.drain, settings.drain_seconds, line)
        server.run(sockets=[listener.socket])
    finally:
        engine.stop()


class Listener:
    """Takes an address at once, and connections later, when there is something that answers.

    Both raise `CareError` if the address cannot be used: two may take one, but not listen on it.
    """

    def __init__(self, host: str, port: int) -> None:
        self._address = host, port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with self._usable():
            self.socket.bind(self._address)

    def listen(self, backlog: int) -> str:
        """From here on connections are accepted, if only into the backlog; returns the URL."""
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
            message = f"cannot be used ({error.strerror}): set CARE_HOST or CARE_PORT to another"
            raise CareError(
                f"{host}:{port} {message}", code="address_unavailable", host=host, port=port
            ) from error


class DrainingServer(uvicorn.Server):
    """Goes on for a while after the first signal, then ends what is in work.

    A second signal does not wait; a third one, if it is SIGINT, leaves what is in work. `drain` is
    called at each. The line is printed once it serves, and a signal ends it in order.
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
        """Starts to serve; uvicorn has taken over the signals by now."""
        await super().startup(sockets)
        if self.started:
            sys.stdout.write(self._line)
            sys.stdout.flush()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called at each signal."""
        self._drain()
        if self._end_at is None and self._drain_seconds:
            self._end_at = time.monotonic() + self._drain_seconds
        else:
            super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        """Returns whether to end; uvicorn asks ten times a second."""
        self.should_exit |= self._end_at is not None and time.monotonic() >= self._end_at
        return await super().on_tick(counter)
