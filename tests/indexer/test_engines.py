"""The choice of what runs the encoder; tests/distributed holds Ray itself to the local engine."""

import sys
from pathlib import Path

import pytest

from indexer.__main__ import main
from tests.conftest import make_records, write_jsonl


def test_without_ray_the_command_says_what_to_install(
    tmp_path: Path,
    pair_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "indexer.ray_encoding", raising=False)
    corpus = write_jsonl(tmp_path / "corpus.jsonl", make_records(3))
    arguments = ["encode", "--corpus", str(corpus), "--index", "test", "--pair", str(pair_file)]
    arguments += ["--builds", str(tmp_path / "builds"), "--engine", "ray"]
    assert main(arguments) == 1
    expected = "error: --engine ray needs ray: pip install 'care-retrieval[distributed]'\n"
    assert capsys.readouterr().err == expected
