"""The commands of README.md and docs/ work: each page is run as one session in one folder.

Blocks that need a GPU, a model hub, Docker, a cluster or hours are marked; their `care` commands
are parsed, so that at least their options exist.
"""

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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from playwright._impl._driver import compute_driver_executable

from care.cli.main import app
from core.service_process import free_port
from tests.curation.endpoints import grader, scripted_server
from tests.docs.pages import NEEDS, PAGES, ROOT, Block, blocks, shell_commands

pytestmark = pytest.mark.e2e

MARKS = {"needs", "file", "prints", "before"}
# Commands that serve until they are stopped.
SERVERS = (["care", "serve"], ["care", "demo"], ["make", "serve"], ["make", "demo"])
# Seconds of load, at a rate that a busy machine serves too.
SHORTER = {"DURATION=30s": "DURATION=5s", "MIN_RATE=50": "MIN_RATE=1"}
QUERIES_OF_A_SPLIT = 4
ENVIRONMENTS = (".venv", ".venv-test", ".venv-check", ".venv-loadtest")


class Session:
    """A terminal in a folder that looks like a checkout, with a small sample."""

    def __init__(self, folder: Path, judge: str) -> None:
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
        elif list(shell_commands(text))[-1][:2] in SERVERS:
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


@pytest.fixture
def session(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Session]:
    folder = tmp_path / "checkout"
    make_checkout(folder)
    if "make demo\n" in page.read_text("utf-8"):
        # Whose vectors the demo takes.
        shutil.copytree(request.getfixturevalue("sample") / "builds", folder / "builds")
    monkeypatch.chdir(folder)
    for name in [name for name in os.environ if name.startswith("CARE_")]:
        monkeypatch.delenv(name)
    with scripted_server(grader(grade)) as judge:
        session = Session(folder, judge)
        yield session
        session.close()


def pages_to_run() -> list[Path]:
    """Returns the pages with blocks that run; of pages with the same blocks, such as translations,
    the first.
    """
    pages: dict[tuple[tuple[str, ...], ...], Path] = {}
    for page in PAGES:
        ran = [block for block in blocks(page) if block.runs]
        key = tuple((block.language, block.text, block.mark, block.value) for block in ran)
        pages.setdefault(key, page)
    pages.pop((), None)
    return list(pages.values())


# Some pages train or export a pair, which takes minutes on a busy machine.
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "page",
    pages_to_run(),
    ids=lambda page: page.stem,
)
def test_the_commands_of_a_page_work_one_after_the_other(
    page: Path, session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    for block in blocks(page):
        session.run(block, capsys)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_block_that_is_not_run_says_what_it_needs(page: Path) -> None:
    for block in blocks(page):
        assert block.language, f"{block}: name the language, text if it is none"
        assert block.mark in MARKS | {""}, f"{block}: {block.mark}"
        if block.mark == "needs":
            assert block.value in NEEDS, f"{block}: {block.value} is none of {sorted(NEEDS)}"
            assert block.language in ("sh", "python"), f"{block}: is not run anyway"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_that_are_not_run_have_options_that_exist(page: Path) -> None:
    for block in blocks(page):
        if block.language == "sh" and not block.runs:
            for words in shell_commands(block.text):
                check(words, str(block))


def check(words: list[str], place: str) -> None:
    """Parses a `care` command, or those that a `make` command would run."""
    if words[0] == "torchrun":
        words = words[words.index("-m") + 1 :]
    if words[0] == "runuser":
        words = ["care", *words[words.index("--") + 2 :]]
    if words[0] == "care":
        parse(words[1:], place)
    elif words[0] == "make":
        done = subprocess.run(
            ["make", "--dry-run", "--always-make", *words[1:]],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{place}: {words}: {done.stderr}"
        for command in shell_commands(done.stdout):
            if command[0].endswith("/bin/care"):
                parse(command[1:], place)


def parse(arguments: list[str], place: str) -> None:
    """Parses the arguments of `care` down to the subcommand, without running it."""
    command: Any = typer.main.get_command(app)
    context = command.make_context("care", list(arguments))
    while hasattr(command, "resolve_command"):
        rest = [*context._protected_args, *context.args]
        name, command, rest = command.resolve_command(context, rest)
        assert command, f"{place}: care {' '.join(arguments)}"
        context = command.make_context(name, rest, parent=context)


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
