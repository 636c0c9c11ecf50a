"""`care serve` runs the search service; `care key` makes an API key for it."""

import os
import sys
from dataclasses import asdict
from typing import Annotated, Literal

from typer import Option

from care.cli.options import Json, Port, Served, takes_fields
from care.cli.output import note, show


@takes_fields
def serve(
    served: Served,
    host: Annotated[
        str | None,
        Option(metavar="ADDRESS", help="Address to listen on (default: CARE_HOST, or 127.0.0.1)."),
    ] = None,
    port: Port = None,
    workers: Annotated[
        str | None,
        Option(
            metavar="N",
            help="Processes that serve together (default: CARE_WORKERS, or as many as there are "
            "processors and memory for).",
        ),
    ] = None,
) -> None:
    """Serve an index over HTTP: POST /search, a search page and metrics.

    All other settings are CARE_* variables: see docs/reference/settings.md.
    """
    given = asdict(served) | {"host": host, "port": port, "workers": workers}
    for name, value in given.items():
        if value is not None:
            os.environ[f"CARE_{name.upper()}"] = str(value)
    # Before faiss is imported: idle threads of OpenMP must not spin.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Requests are the parallelism, so the tokenizer uses no threads of its own.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

    from service.settings import read_settings
    from service.workers.supervisor import choose_workers, supervise

    settings = read_settings()
    count, reason = choose_workers(settings)

    def announce(url: str) -> None:
        sys.stdout.write(f"serving index '{settings.index}' on {url}\n")
        sys.stdout.flush()

    if count > 1:
        supervise(settings, count, reason, announce)
        return
    from service.server import serve as serve_alone

    serve_alone(settings, announce)


def key(
    name: Annotated[str, Option(metavar="NAME", help="Name of the key's user, for logs.")],
    role: Annotated[
        Literal["search", "admin"], Option(help="search, or admin to reload the index too.")
    ] = "search",
    json_: Json = False,
) -> None:
    """Make an API key: a secret for the client and an entry for CARE_API_KEYS."""
    from service.access.api_keys import new_key

    secret, entry = new_key(name, role)
    show({"secret": secret, "entry": entry}, [secret, entry], as_json=json_)
    if not json_:
        note("The first line is for the client, the second for CARE_API_KEYS or its file.")
