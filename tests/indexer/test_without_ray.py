"""The choice of the executor without Ray; tests/engines/distributed tests Ray."""

import sys
from pathlib import Path

import pytest

from care.cli.main import main
from tests.conftest import make_records, write_jsonl
from tests.errors import error_code


def test_without_ray_the_command_names_the_package_to_install(
    tmp_path: Path,
    pair_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "indexer.ray_executor", raising=False)
    corpus = write_jsonl(tmp_path / "corpus.jsonl", make_records(3))
    arguments = ["index", str(corpus), "--encode-only", "--index", "test", "--pair", str(pair_file)]
    arguments += ["--builds", str(tmp_path / "builds"), "--executor", "ray"]
    assert main(arguments) == 1
    assert error_code(capsys.readouterr().err) == "not_installed"
