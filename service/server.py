"""The process that serves: its socket, its signals, its end."""

import gc
import signal
import socket
import sys
import time
from collections.abc import Callable
from types import FrameType

import uvicorn

from core.errors import CareError
from service.app import create_app
from service.logs import configure_logs
from service.settings import Settings


def serve(settings: Settings) -> None:
    """Serves until SIGINT or SIGTERM ends the process with status 0.

    Raises:
        CareError: If the service cannot start.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)
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
        url = listener.listen(config.backlog)
        sys.stdout.write(f"serving index '{settings.index}' on {url}\n")
        sys.stdout.flush()
        server = DrainingServer(config, engine.drain, settings.drain_seconds)
        server.run(sockets=[listener.socket])
    finally:
        engine.stop()


class Listener:
    """Takes an address at once, and connections later, when there is something that answers.

    Raises:
        CareError: If the address cannot be used.
    """

    def __init__(self, host: str, port: int) -> None:
        self._address = host, port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._try(lambda: self.socket.bind(self._address))

    def listen(self, backlog: int) -> str:
        """From here on connections are accepted, if only into the backlog; returns the URL.

        Raises:
            CareError: If another process has come to listen there meanwhile.
        """
        self._try(lambda: self.socket.listen(backlog))
        host, port = self.socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except OSError as error:
            self.socket.close()
            host, port = self._address
            raise CareError(
                f"{host}:{port} cannot be used ({error.strerror}): "
                "set CARE_HOST or CARE_PORT to another",
                code="address_unavailable",
                host=host,
                port=port,
            ) from error


class DrainingServer(uvicorn.Server):
    """Goes on for a while after the first signal, then ends what is in work.

    A second signal does not wait; a third one, if it is SIGINT, leaves what is in work.

    Args:
        config: Uvicorn's settings.
        drain: Called at each signal.
        drain_seconds: How long it goes on [s].
    """

    def __init__(
        self, config: uvicorn.Config, drain: Callable[[], None], drain_seconds: float
    ) -> None:
        super().__init__(config)
        self._drain = drain
        self._drain_seconds = drain_seconds
        self._end_at: float | None = None

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


def _end(number: int, frame: FrameType | None) -> None:
    """Ends the process; uvicorn calls it once the requests in work are answered."""
    sys.exit(0)
