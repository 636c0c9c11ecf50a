"""`python -m service`: the search service, configured by `CARE_*` variables.

`python -m service key --name app --role search` makes a key for `CARE_API_KEYS`.
"""

import argparse
import gc
import os
import signal
import socket
import sys
from collections.abc import Sequence
from types import FrameType

# Before faiss is imported: threads of OpenMP that wait must not spin.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Likewise the tokenizer's own threads: requests are the parallelism.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import uvicorn
from pydantic import ValidationError

from core.errors import CareError
from service.api_keys import new_key
from service.app import create_app, load_query_encoder
from service.engine import Engine
from service.logs import configure_logs
from service.settings import Settings


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m service", description="Serve an index, as the CARE_* variables say."
    )
    commands = parser.add_subparsers(dest="command")
    key = commands.add_parser("key", help="make a key for CARE_API_KEYS")
    key.add_argument("--name", required=True, help="who will use it")
    key.add_argument("--role", choices=("search", "admin"), default="search")
    chosen = parser.parse_args(arguments)
    try:
        if chosen.command == "key":
            secret, entry = new_key(chosen.name, chosen.role)
            print(f"{secret}\n{entry}")
            print(
                "The first line is for the client, the second for CARE_API_KEYS.", file=sys.stderr
            )
        else:
            serve(Settings())
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        name = "".join(f"CARE_{field}: ".upper() for field in first["loc"][:1])
        print(f"error: {name}{first['msg'].removeprefix('Value error, ')}", file=sys.stderr)
    except CareError as error:
        print(f"error: {error}", file=sys.stderr)
    else:
        return 0
    return 1


def serve(settings: Settings) -> None:
    """Serves until SIGINT or SIGTERM ends the process with status 0.

    Raises:
        CareError: If the service cannot start.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)
    configure_logs(settings.log_level)
    listener = _listen(settings)
    app = create_app(settings, load_query_encoder(settings))
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level=settings.log_level,
        access_log=False,
        server_header=False,
        proxy_headers=False,
    )
    # What lives as long as the process need not be looked through by each collection.
    gc.collect()
    gc.freeze()
    # From here on connections are accepted, if only into the backlog.
    listener.listen(config.backlog)
    host, port = listener.getsockname()[:2]
    print(f"serving index '{settings.index}' on http://{host}:{port}", flush=True)
    _Server(config, app.state.service.engine, settings.drain_seconds).run(sockets=[listener])


class _Server(uvicorn.Server):
    """Goes on for a while after the first signal, no longer ready; then ends what is in work."""

    def __init__(self, config: uvicorn.Config, engine: Engine, drain_seconds: float) -> None:
        super().__init__(config)
        self._engine = engine
        self._drain_seconds = drain_seconds
        self._draining = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called at each signal."""
        self._engine.drain()
        if self._draining or not self._drain_seconds:
            super().handle_exit(sig, frame)
            return
        self._draining = True
        signal.signal(signal.SIGALRM, lambda *_: super(_Server, self).handle_exit(sig, frame))
        signal.setitimer(signal.ITIMER_REAL, self._drain_seconds)


def _end(number: int, frame: FrameType | None) -> None:
    """Ends the process; uvicorn calls it once the requests in work are answered."""
    sys.exit(0)


def _listen(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        raise CareError(
            f"{settings.host}:{settings.port} cannot be used ({error.strerror}): "
            "set CARE_HOST or CARE_PORT to another"
        ) from error
    return listener


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
