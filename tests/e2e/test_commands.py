"""The commands of the README, run as a new user runs them."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from care.cli.main import main
from core.service_process import free_port
from core.versions import IndexFolder
from tests.conftest import SAMPLE
from tests.e2e.conftest import ROOT
from tests.errors import error_code

pytestmark = pytest.mark.e2e


def start_demo(folder: Path, port: int, stderr: int | None = None) -> "subprocess.Popen[str]":
    variables = {"CARE_PORT": str(port), "CARE_INDEX": "sample", "CARE_PAIR": "care-mini"}
    # The demo asks its own service, which no proxy reaches.
    variables |= {"HTTP_PROXY": "http://127.0.0.1:9", "ALL_PROXY": "socks5://127.0.0.1:9"}
    return subprocess.Popen(
        [sys.executable, "-m", "care", "demo"],
        cwd=folder,
        env=os.environ | variables | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        start_new_session=True,
    )


def read_until_up(demo: "subprocess.Popen[str]") -> str:
    assert demo.stdout
    lines = []
    for line in demo.stdout:
        lines.append(line)
        if line.startswith("Stop"):
            break
    return "".join(lines)


def test_demo_answers_and_refuses_stays_up_and_reuses_its_index(
    tmp_path: Path, sample: Path
) -> None:
    # Reuses the vectors of an earlier build, because encoding takes most of the time.
    shutil.copytree(sample / "builds", tmp_path / "builds")
    versions = []
    for end in (signal.SIGTERM, signal.SIGKILL):
        port = free_port()
        demo = start_demo(tmp_path, port, subprocess.PIPE)
        output = read_until_up(demo)
        versions.append(IndexFolder(tmp_path / "indexes", "sample").active())
        assert output.count("问：") == 4
        refused = output.partition("红烧肉")[2].splitlines()[1]
        assert "answerable" in refused
        assert output.count("answerable 0.") == 1
        assert output.count("  1. ") == 3
        assert f"http://127.0.0.1:{port}/" in output
        assert "curl" in output
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready") as response:
            assert response.status == 200
        demo.send_signal(end)
        # The service has inherited standard error, which is at its end when both have ended.
        demo.communicate(timeout=60)
        assert demo.returncode == (-signal.SIGKILL if end is signal.SIGKILL else 0)
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0, "the service still listens"
    assert len(set(versions)) == 1


def test_demo_names_the_variable_when_the_port_is_taken(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        demo = start_demo(tmp_path, taken.getsockname()[1], subprocess.PIPE)
        _, errors = demo.communicate(timeout=120)
    assert demo.returncode == 1
    assert error_code(errors) == "address_unavailable"
    assert "CARE_PORT=" in errors


def test_a_demo_that_loses_its_port_ends_with_one_line(tmp_path: Path, sample: Path) -> None:
    """The port is free when the demo looks, and taken when the service does."""
    shutil.copytree(sample / "builds", tmp_path / "builds")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        demo = start_demo(tmp_path, taken.getsockname()[1], subprocess.PIPE)
        _, errors = demo.communicate(timeout=120)
    assert demo.returncode == 1
    lines = [line for line in errors.splitlines() if line.startswith("error")]
    assert [error_code(line) for line in lines] == ["address_unavailable"]
    assert "Traceback" not in errors


def test_evaluate_prints_the_pair_beside_bm25(
    indexes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "scores.json"
    queries, qrels = SAMPLE / "queries.jsonl", SAMPLE / "qrels" / "test.tsv"
    arguments = ["--index", "sample", "--indexes", str(indexes), "--output", str(output)]
    assert main(["evaluate", *arguments, "--queries", str(queries), "--qrels", str(qrels)]) == 0
    shown = capsys.readouterr().out
    for name in ("nDCG@10", "MRR@10", "Recall@10", "Recall@100", "care-mini", "BM25"):
        assert name in shown
    written = json.loads(output.read_text("utf-8"))
    ndcg = {system: scores["nDCG@10"] for system, scores in written["scores"].items()}
    words, characters = ndcg.pop("BM25, words"), ndcg.pop("BM25, characters and bigrams")
    assert (
        min(ndcg["dense"], ndcg["hybrid"]) > max(words, characters) > min(words, characters) > 0.2
    )
    assert set(ndcg) == set(written["speeds"]) == {"dense", "lexical", "hybrid"}
