"""What the documents show works: their requests are sent, their code is run."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from indexer.__main__ import _parser
from tests.e2e.conftest import ROOT

pytestmark = pytest.mark.e2e

ADDRESS = "http://127.0.0.1:8000"
SCALE = ROOT / "docs" / "indexing-at-scale.md"
DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "operations.md", SCALE)


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text("utf-8"), re.M | re.S)


def test_the_readme_curl_finds_passages(url: str) -> None:
    (command,) = blocks(ROOT / "README.md", "bash")
    output = subprocess.run(
        ["bash", "-c", command.replace(ADDRESS, url)], capture_output=True, text=True, check=True
    ).stdout
    assert '"hits":[{' in output
    assert "心血管科" in output


def test_the_readme_python_examples_run_one_after_the_other(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    namespace: dict[str, object] = {}
    examples = blocks(ROOT / "README.md", "python")
    assert len(examples) == 2
    for code in examples:
        exec(code.replace(ADDRESS, url), namespace)
    output = capsys.readouterr().out
    assert "1. 0." in output
    assert "[1] " in output


def test_the_operations_reload_command_works(url: str) -> None:
    commands = [b for b in blocks(ROOT / "docs" / "operations.md", "sh") if b.startswith("curl")]
    (command,) = commands
    output = subprocess.run(
        ["bash", "-c", command.replace(ADDRESS, url)],
        capture_output=True,
        text=True,
        check=True,
        env={"ADMIN_KEY": "secret", "PATH": "/usr/bin:/bin"},
    ).stdout
    assert '"name":"sample"' in output


def test_every_make_target_in_the_documents_exists() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = set(re.findall(r"^([a-z0-9-]+):", makefile, re.M))
    for path in DOCUMENTS:
        named = set(re.findall(r"(?:^|`)make ([a-z0-9-]+)", path.read_text("utf-8"), re.M))
        assert named <= targets, path


def test_the_arguments_that_indexes_are_built_with_exist() -> None:
    shown = [
        shlex.split(arguments)
        for path in DOCUMENTS
        for arguments in re.findall(r"INDEX_ARGS='([^']+)'", path.read_text("utf-8"))
    ]
    assert len(shown) >= 5
    for arguments in shown:
        _parser().parse_args(["build", "--corpus", "c", "--index", "i", *arguments])


def test_every_local_link_in_the_documents_leads_somewhere() -> None:
    for path in (*DOCUMENTS, ROOT / "docs" / "architecture.md"):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text("utf-8")):
            assert (path.parent / target).exists(), f"{path.name}: {target}"
