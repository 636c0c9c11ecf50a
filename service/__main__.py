"""`python -m service`: the search service, configured by `CARE_*` variables."""

import os
import signal
import socket
import sys
from types import FrameType

# Before faiss is imported: threads of OpenMP that wait must not spin.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import uvicorn
from pydantic import ValidationError

from core.errors import CareError
from service.app import create_app, load_query_encoder
from service.settings import Settings


def main() -> int:
    """Serves until SIGINT or SIGTERM ends it with status 0; returns 1 if it cannot start."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)
    try:
        settings = Settings()
        listener = _listen(settings)
        app = create_app(settings, load_query_encoder(settings))
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        name = "CARE_" + ".".join(map(str, first["loc"])).upper()
        print(f"error: {name}: {first['msg']}", file=sys.stderr)
    except CareError as error:
        print(f"error: {error}", file=sys.stderr)
    else:
        config = uvicorn.Config(app, log_level=settings.log_level, access_log=False)
        # From here on connections are accepted, if only into the backlog.
        listener.listen(config.backlog)
        host, port = listener.getsockname()[:2]
        print(f"serving index '{settings.index}' on http://{host}:{port}", flush=True)
        uvicorn.Server(config).run(sockets=[listener])
        return 0
    return 1


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
    sys.exit(main())
