"""Processes that change an index beside a service of several workers."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from care.cli.main import main
from core.service_process import running_service
from core.versions import IndexFolder, read_manifest
from tests.e2e.services import wait_until
from tests.e2e.test_live import Asking

pytestmark = pytest.mark.e2e


def test_a_service_follows_an_index_that_follows_a_folder(tmp_path: Path) -> None:
    notes, indexes = tmp_path / "notes", tmp_path / "indexes"
    notes.mkdir()
    (notes / "a.md").write_text("# 咖啡与血压\n\n咖啡因会使血压短时升高。", "utf-8")
    where = ["--index", "mine", "--indexes", str(indexes), "--builds", str(tmp_path / "builds")]
    assert main(["index", str(notes), *where]) == 0
    output, log = tmp_path / "output", tmp_path / "log"
    with (
        output.open("w") as written,
        log.open("w") as logged,
        running_service(indexes, "mine", WORKERS="2", WATCH_SECONDS="600") as service,
        subprocess.Popen(
            [sys.executable, "-m", "care", "update", "--watch", str(notes), *where],
            stdout=written,
            stderr=logged,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        ) as watching,
    ):
        asking = Asking(service)
        wait_until(lambda: "1 unchanged: a.md" in output.read_text("utf-8"))
        (notes / "b.txt").write_text("扭伤后先休息，四十八小时内冷敷。", "utf-8")
        (notes / "bad.pdf").write_text("扭伤", "utf-8")
        wait_until(lambda: "1 documents added" in output.read_text("utf-8"))
        assert wait_until(lambda: asking.found("扭伤了怎么办") == {"b.txt#1"}) < 20
        (notes / "b.txt").unlink()
        wait_until(lambda: asking.found("扭伤了怎么办") == {"a.md#咖啡与血压"})
        watching.send_signal(signal.SIGINT)
        assert watching.wait(60) == 130
    (unread, ended) = log.read_text("utf-8").splitlines()
    assert unread.startswith(f"WARNING: {notes}/bad.pdf ") and ended.startswith("interrupted")
    assert main(["versions", "verify", "--index", "mine", "--indexes", str(indexes)]) == 0


def test_workers_follow_a_base_that_is_built_anew(own_indexes: Path) -> None:
    with running_service(own_indexes, "sample", WORKERS="2", WATCH_SECONDS="600") as service:
        asking = Asking(service)
        asking.write("PUT", "/documents", {"_id": "new", "text": "蓝色独角兽在月球上弹钢琴。"})
        settings = {"CARE_INDEXES": str(own_indexes), "CARE_INDEX": "sample"}
        command = [sys.executable, "-m", "care.live", "sample"]
        subprocess.run(command, env=os.environ | settings, check=True, timeout=100)
        folder = IndexFolder(own_indexes, "sample")
        assert read_manifest(folder.version(folder.active())).segments == ()
        wait_until(lambda: asking.write("GET", "/index")["version"] == folder.active())
        assert asking.found("蓝色独角兽在月球上弹钢琴") == {"new"}
