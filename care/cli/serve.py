"""`care serve` runs the search service, `care demo` with a sample; `care key` makes an API key."""

import os
import sys
from dataclasses import asdict
from datetime import date
from typing import Annotated, Any, Literal

from typer import BadParameter, Option

from care.cli.options import Json, Port, Served, takes_fields
from care.cli.output import note, print_lines, show
from care.cli.search import filter_of


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


def demo(
    port: Port = None,
    check: Annotated[
        bool,
        Option("--check", help="End after the questions, with status 1 if an answer is wrong."),
    ] = False,
) -> None:
    """Index the sample corpus, serve it with a search page and ask four questions.

    The index is written to the folders of CARE_INDEXES and CARE_BUILDS; Ctrl-C ends the service.
    """
    if port is not None:
        os.environ["CARE_PORT"] = port
    from care.demo import demo as run_demo

    run_demo(lambda line: print_lines([line]), check=check)


def key(
    name: Annotated[str, Option(metavar="NAME", help="Name of the key's user, for logs.")],
    role: Annotated[
        Literal["search", "write", "admin"],
        Option(
            help="search; write to change documents too; admin to reload the index too. Each "
            "includes those before it."
        ),
    ] = "search",
    index: Annotated[
        list[str] | None,
        Option(
            metavar="NAME",
            help="Index that the key opens, or several by * as in ward-*. May be repeated. "
            "(default: the index of CARE_INDEX)",
            show_default=False,
        ),
    ] = None,
    filter_: Annotated[
        list[str] | None,
        Option(
            "--filter",
            metavar="FIELD=VALUE",
            help="Documents that the key sees or changes, as for care search; others do not exist "
            "for it. Needs --index and the role search or write. May be repeated.",
        ),
    ] = None,
    expires: Annotated[
        str | None,
        Option(metavar="DATE", help="Last day of the key, in UTC: YYYY-MM-DD. Needs --index."),
    ] = None,
    json_: Json = False,
) -> None:
    """Make an API key: a secret for the client and an entry for CARE_API_KEYS or its file.

    With --index the entry is TOML, for CARE_API_KEYS_FILE.
    """
    from service.access.api_keys import new_key

    if (filter_ or expires) and not index:
        raise BadParameter("needs --index", param_hint="--filter" if filter_ else "--expires")
    grant: dict[str, Any] = {"role": role}
    if filter_:
        grant["filter"] = filter_of(filter_)
    grants = [{"indexes": each, **grant} for each in index or ()]
    secret, entry = new_key(name, role, grants, _day(expires))
    show({"secret": secret, "entry": entry}, [secret, *entry.splitlines()], as_json=json_)
    if not json_:
        where = (
            "the rest for CARE_API_KEYS_FILE"
            if grants
            else "the second for CARE_API_KEYS or its file"
        )
        note(f"The first line is for the client, {where}.")


def _day(text: str | None) -> date | None:
    try:
        return date.fromisoformat(text) if text else None
    except ValueError:
        raise BadParameter(f"'{text}' is not YYYY-MM-DD", param_hint="--expires") from None
