"""Options of the benchmarks, servers and processes that are measured."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest

from core.errors import CareError
from core.service_process import free_port, running_server
from loadtest.bench.processes import (
    Server,
    anonymous_bytes,
    in_process,
    options_json,
    parse_options,
    sampled,
)
from tests.errors import raises

SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        text = b"# HELP care_total x\\ncare_total{a=\\"1\\"} 2.0\\ncare_total{a=\\"2\\"} 3.0\\n"
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@dataclass(frozen=True)
class Some:
    sizes: Annotated[tuple[int, ...], "Sizes of the corpora."] = (1, 2)
    share: Annotated[float | None, "5 % or so."] = None
    cache_folder: Annotated[Path, "Where it lies."] = Path("builds")


def test_fields_are_options_with_their_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_options(Some, []) == Some()
    given = ["--sizes", "3", "4", "--share", "0.5", "--cache-folder", "here"]
    assert parse_options(Some, given) == Some((3, 4), 0.5, Path("here"))
    with pytest.raises(SystemExit):
        parse_options(Some, ["--help"])
    text = capsys.readouterr().out
    assert all(help_ in text for help_ in ("Sizes of the corpora.", "5 % or so.", "Where it lies."))


def test_options_are_json() -> None:
    assert options_json(Some()) == {"sizes": (1, 2), "share": None, "cache_folder": "builds"}


def test_folders_of_a_machine_are_not_written_into_results(tmp_path: Path) -> None:
    assert options_json(Some(cache_folder=tmp_path / "builds"))["cache_folder"] == "builds"


def test_a_server_is_measured_until_the_block_ends() -> None:
    port = free_port()
    command = [sys.executable, "-c", SERVER, str(port)]
    with running_server(
        command, f"http://127.0.0.1:{port}", "/", environment=os.environ
    ) as process:
        server = Server(process)
        assert server.metric("care_total") == 5.0
        with raises(CareError, "metric_missing", metric="care_tot"):
            server.metric("care_tot")
        with sampled(server.rss, every=0.01) as samples:
            server.get("/")
        assert 0 < samples[0] <= max(samples)
        assert len(samples) >= 2
        assert server.cpu() > 0
        assert 0 < anonymous_bytes(server.process.pid) <= server.rss()
    assert not server.process.is_running()


@pytest.mark.e2e
def test_work_in_a_fresh_process_returns_or_raises() -> None:
    assert in_process(os.getpid) != os.getpid()
    with pytest.raises(ZeroDivisionError):
        in_process(divmod, 1, 0)
