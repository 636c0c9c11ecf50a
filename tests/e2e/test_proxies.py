"""Commands with a proxy in the environment: it gets no request, and no question."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import SAMPLE
from tests.e2e.conftest import ROOT
from tests.proxies import recording_server

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("scheme", ["http", "socks5"])
def test_care_evaluate_asks_its_service_directly(indexes: Path, scheme: str) -> None:
    arguments = ["--index", "sample", "--indexes", str(indexes)]
    arguments += ["--queries", str(SAMPLE / "queries.jsonl")]
    arguments += ["--qrels", str(SAMPLE / "qrels" / "test.tsv")]
    command = [sys.executable, "-m", "care", "evaluate", *arguments]
    with recording_server() as (port, targets):
        address = f"{scheme}://127.0.0.1:{port}"
        variables = dict.fromkeys(("HTTP_PROXY", "http_proxy", "ALL_PROXY"), address)
        result = subprocess.run(
            command, cwd=ROOT, env=os.environ | variables, capture_output=True, check=False
        )
    assert result.returncode == 0, result.stderr
    assert targets == []
