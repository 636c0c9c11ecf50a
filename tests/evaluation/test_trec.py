import gzip
from pathlib import Path

import pytest

from core.errors import CareError, DataError
from evaluation.trec import read_run, write_run
from tests.errors import raises


def test_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    run = {"q1": {"a": 0.25, "b": 0.1 + 0.2}, "q2": {"c": -1.5}}
    write_run(tmp_path / "run.trec", run, "care-mini")
    assert read_run(tmp_path / "run.trec") == run
    first = (tmp_path / "run.trec").read_text("utf-8").splitlines()[0]
    assert first == "q1 Q0 b 1 0.30000000000000004 care-mini"


@pytest.mark.parametrize("words", [("a b", "d", "x"), ("q", "a b", "x"), ("q", "d", "a b")])
def test_a_name_with_white_space_is_an_error(tmp_path: Path, words: tuple[str, str, str]) -> None:
    query, document, system = words
    with raises(CareError, code="white_space_in_id", id="a b"):
        write_run(tmp_path / "run.trec", {query: {document: 1.0}}, system)
    assert not list(tmp_path.iterdir())


def test_a_compressed_run_is_ranked_by_scores_not_by_ranks(tmp_path: Path) -> None:
    path = tmp_path / "run.trec.gz"
    path.write_bytes(gzip.compress(b"q Q0 a 1 0.25 other\n\nq Q0 b 2 0.5 other\n"))
    assert read_run(path) == {"q": {"a": 0.25, "b": 0.5}}


@pytest.mark.parametrize("line", ["q Q0 a", "q Q0 a 2 high x", "q Q0 a 2 nan x", "q Q0 a 2 inf x"])
def test_a_wrong_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "run.trec"
    path.write_text(f"q Q0 a 1 0.5 x\n{line}\n", "utf-8")
    with raises(DataError, code="not_run", path=path, line=2):
        read_run(path)
    path.write_text("q Q0 a 1 0.5 x\nr Q0 a 1 0.5 x\nq Q0 a 3 0.25 x\n", "utf-8")
    with raises(DataError, code="contradiction", path=path, line=3):
        read_run(path)
    path.write_bytes(b"\xff\xfe")
    with raises(DataError, code="not_utf8", path=path):
        read_run(path)
