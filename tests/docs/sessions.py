"""Pages of README.md and docs/ as sessions: their blocks run one after the other in one folder."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from playwright._impl._driver import compute_driver_executable

from core.service_process import free_port
from tests.curation.endpoints import grader, scripted_server
from tests.docs.pages import PAGES, ROOT, Block, blocks, shell_commands

# Commands that serve until they are stopped.
SERVERS = (["care", "serve"], ["care", "demo"], ["make", "serve"], ["make", "demo"])
# Seconds of load, at a rate that a busy machine serves too.
SHORTER = {"DURATION=30s": "DURATION=5s", "MIN_RATE=50": "MIN_RATE=1"}
QUERIES_OF_A_SPLIT = 4
ENVIRONMENTS = (".venv", ".venv-test", ".venv-check", ".venv-loadtest")


def pages_to_run(*, serving: bool) -> list[Path]:
    """Returns the pages with blocks that run, those that start a server or the others; of pages
    with the same blocks, such as translations, the first.
    """
    pages: dict[tuple[tuple[str, ...], ...], Path] = {}
    for page in PAGES:
        ran = [block for block in blocks(page) if block.runs]
        if ran and serving == any(map(_serves, ran)):
            key = tuple((block.language, block.text, block.mark, block.value) for block in ran)
            pages.setdefault(key, page)
    return list(pages.values())


def run_page(
    page: Path, folder: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    """Runs the blocks of a page in a new folder."""
    make_checkout(folder)
    if "make demo\n" in page.read_text("utf-8"):
        # Whose vectors the demo takes.
        shutil.copytree(request.getfixturevalue("sample") / "builds", folder / "builds")
    with pytest.MonkeyPatch.context() as patch, scripted_server(grader(grade)) as judge:
        patch.chdir(folder)
        session = Session(page, folder, judge)
        try:
            for block in blocks(page):
                session.run(block, capsys)
        finally:
            session.close()


def _serves(block: Block) -> bool:
    return block.language == "sh" and list(shell_commands(block.text))[-1][:2] in SERVERS


class Session:
    """A terminal in a folder that looks like a checkout, with a small sample."""

    def __init__(self, page: Path, folder: Path, judge: str) -> None:
        self.folder = folder
        self.port = free_port()
        self.python: dict[str, Any] = {}
        self.environment = {
            name: value for name, value in os.environ.items() if not name.startswith("CARE_")
        } | {
            "CARE_PORT": str(self.port),
            "PATH": f"{folder}/.venv/bin:{os.environ['PATH']}:/usr/sbin",
            "PYTHONPATH": str(ROOT),
            "ADMIN_KEY": "",
        }
        if page.name != "README.md":  # whose service has the default number of workers
            self.environment["CARE_WORKERS"] = "1"
        self._replace = SHORTER | {
            "127.0.0.1:8000": f"127.0.0.1:{self.port}",
            "8443": str(free_port()),
            "/opt/care": f"{folder}/opt/care",
            "http://127.0.0.1:8001/v1": judge,
        }
        self._server: subprocess.Popen[bytes] | None = None
        proxy = folder / "deploy" / "nginx.conf"
        proxy.write_text(self._here(proxy.read_text("utf-8")), "utf-8")

    def _here(self, text: str) -> str:
        # At once: a port that takes the place of another one may have the digits of a third one.
        shown = "|".join(map(re.escape, sorted(self._replace, key=len, reverse=True)))
        return re.sub(shown, lambda match: self._replace[match[0]], text)

    def run(self, block: Block, capsys: pytest.CaptureFixture[str]) -> None:
        """Writes or runs a block; what it prints must hold what its mark says."""
        text = self._here(block.text)
        if block.mark == "file":
            (self.folder / block.value).write_text(text, "utf-8")
        elif not block.runs:
            return
        elif block.language == "python":
            exec(compile(text, str(block), "exec"), self.python)
            output = capsys.readouterr().out
        elif _serves(block):
            self._serve(text, block)
        else:
            if block.mark == "before":
                self._shell(block.value, block)
            output = self._shell(text, block)
        if block.mark == "prints":
            assert block.value in output, f"{block} prints:\n{output}"

    def _shell(self, text: str, block: Block) -> str:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=250,
        )
        assert done.returncode == 0, f"{block}:\n{text}\n{done.stdout}{done.stderr}"
        return done.stdout

    def _serve(self, text: str, block: Block) -> None:
        """Starts a server, instead of the one that runs, and waits until it is ready."""
        self.close()
        log = self.folder / "server.log"
        with log.open("wb") as file:
            self._server = subprocess.Popen(
                ["bash", "-euc", text],
                cwd=self.folder,
                env=self.environment,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        while not self._ready():
            assert self._server.poll() is None, f"{block}:\n{log.read_text('utf-8')}"
            time.sleep(0.1)

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health/ready", timeout=10):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def close(self) -> None:
        if self._server:
            os.killpg(self._server.pid, signal.SIGTERM)
            self._server.wait(60)
            self._server = None
            while self._ready():
                time.sleep(0.1)


def make_checkout(folder: Path) -> None:
    """Makes a folder with what the pages name: a small sample and recipe, a Makefile, tools."""
    folder.mkdir()
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    for name in ("data", "deploy", "loadtest", "training/recipes"):
        ignored = shutil.ignore_patterns("results", "__pycache__")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    shrink_sample(folder / "data" / "sample")
    releases = folder / "opt" / "care"
    releases.mkdir(parents=True)
    for release in ("0.1.0", "0.2.0"):
        (releases / release).symlink_to(folder / ".venv")
    (releases / "current").symlink_to("0.1.0")
    for name in ENVIRONMENTS:
        programs = {
            "python": f'exec {sys.executable} "$@"',
            "care": f'exec {sys.executable} -m care "$@"',
            # Without --fail an error of the service would look like success.
            "curl": f'exec {shutil.which("curl")} --fail-with-body "$@"',
            "node": f'exec {compute_driver_executable()[0]} "$@"',
        }
        (folder / name / "bin").mkdir(parents=True)
        for program, line in programs.items():
            file = folder / name / "bin" / program
            file.write_text(f"#!/bin/sh\n{line}\n")
            file.chmod(0o755)
        (folder / name / "bin" / "activate").touch()
        # The environments are complete: make installs nothing.
        for stamp in (".base", ".eval", ".complete"):
            (folder / name / stamp).touch()


def shrink_sample(folder: Path) -> None:
    """Keeps some queries of each split, and the documents that are judged for them."""
    documents: set[str] = set()
    queries: set[str] = set()
    for path in (folder / "qrels").glob("*.tsv"):
        header, *rows = path.read_text("utf-8").splitlines()
        kept = list(dict.fromkeys(row.split("\t")[0] for row in rows))[:QUERIES_OF_A_SPLIT]
        rows = [row for row in rows if row.split("\t")[0] in kept]
        path.write_text("\n".join([header, *rows, ""]), "utf-8")
        queries.update(kept)
        documents.update(row.split("\t")[1] for row in rows)
    for name, ids in (("corpus.jsonl", documents), ("queries.jsonl", queries)):
        lines = (folder / name).read_text("utf-8").splitlines()
        kept = [line for line in lines if json.loads(line)["_id"] in ids]
        (folder / name).write_text("\n".join([*kept, ""]), "utf-8")


def grade(_: str, query: str, passage: str) -> str:
    """Judges as a language model would, by what query and passage have in common."""
    words = {query[i : i + 2] for i in range(len(query) - 1)}
    found = sum(bool(re.search(re.escape(word), passage)) for word in words)
    return "S" if found > 2 else "D"
