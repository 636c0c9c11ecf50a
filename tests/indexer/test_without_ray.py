"""The choice of what runs the encoder, without Ray; tests/engines/distributed has Ray itself."""

import sys
from pathlib import Path

import pytest

from indexer.__main__ import main
from tests.conftest import make_records, write_jsonl
from tests.errors import error_code


def test_without_ray_the_command_says_what_to_install(
    tmp_path: Path,
    pair_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "indexer.ray_executor", raising=False)
    corpus = write_jsonl(tmp_path / "corpus.jsonl", make_records(3))
    arguments = ["encode", "--corpus", str(corpus), "--index", "test", "--pair", str(pair_file)]
    arguments += ["--builds", str(tmp_path / "builds"), "--executor", "ray"]
    assert main(arguments) == 1
    assert error_code(capsys.readouterr().err) == "not_installed"
