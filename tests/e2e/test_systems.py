"""Index, search and serve without what only Linux has, as on macOS."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from core.loopback import open_local
from core.service_process import running_service
from tests.conftest import make_records, write_jsonl
from tests.e2e.conftest import ROOT
from tests.errors import error_code

pytestmark = pytest.mark.e2e

# Python imports it at its start.
WITHOUT = """
import ctypes, os, socket

for module, names in ((os, "sched_getaffinity posix_fallocate memfd_create"), (socket, "TCP_INFO")):
    for name in names.split():
        delattr(module, name)


class CDLL(ctypes.CDLL):
    def __getattr__(self, name):
        if name == "prctl":
            raise AttributeError(name)
        return super().__getattr__(name)


ctypes.CDLL = CDLL
"""


@pytest.fixture
def other_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that are started find nothing that only Linux has."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(WITHOUT)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(ROOT)]))


def care(*arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "care", *arguments]
    return subprocess.run(command, env=os.environ | variables, capture_output=True, text=True)


@pytest.mark.usefixtures("other_system")
def test_index_search_and_one_worker_need_no_linux(tmp_path: Path) -> None:
    code = "import os; print(hasattr(os, 'sched_getaffinity'))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"
    corpus = write_jsonl(tmp_path / "corpus.jsonl", make_records(8))
    indexes = tmp_path / "indexes"
    folders = ["--index", "mine", "--indexes", str(indexes)]
    built = care("index", str(corpus), *folders, "--builds", str(tmp_path / "builds"))
    assert built.returncode == 0, built.stderr
    found = care("search", "骨折", *folders, "--json")
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["hits"]
    with running_service(indexes, "mine") as service, open_local(service.url, timeout=60) as page:
        assert page.status == 200
    refused = care("serve", *folders, CARE_WORKERS="2", CARE_PORT="0")
    assert (refused.returncode, error_code(refused.stderr)) == (1, "needs_linux")
    assert "Traceback" not in care("doctor", *folders).stderr


def test_on_windows_the_command_says_what_it_needs() -> None:
    code = "import os, sys; sys.modules['fcntl'] = None; os.name = 'nt'; import care.cli.main"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, error_code(done.stderr)) == (1, "needs_linux")
    assert done.stderr.count("\n") == 1
