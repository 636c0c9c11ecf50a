from pathlib import Path

import pytest

from core.errors import CareError, DataError
from curation.config import AnnotationConfig, BenchmarkConfig, load_config
from tests.errors import raises

GOOD = """\
corpus: corpus.jsonl
queries: /data/queries.jsonl
output: out
retrievers:
  - kind: bm25
  - kind: pair
    pair: pairs/tiny.toml
  - {kind: run, name: other, path: other.trec}
judges:
  - name: one
    base_url: http://localhost:8000/v1
    model: m
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, GOOD), BenchmarkConfig)
    assert config.corpus == tmp_path / "corpus.jsonl"
    assert config.queries == Path("/data/queries.jsonl")
    _, pair, run = config.retrievers
    assert (pair.name, pair.pair) == ("tiny", str(tmp_path / "pairs/tiny.toml"))  # type: ignore[union-attr]
    assert run.path == tmp_path / "other.trec"  # type: ignore[union-attr]
    assert (config.depth, config.language) == (500, "zh")


@pytest.mark.parametrize(
    ("old", "new", "code", "line", "key"),
    [
        ("output: out", "output: out\nsede: 3", "unknown_key", 4, "sede"),
        ("model: m", "modle: m", "missing_key", 10, "judges.0.model"),
        ("model: m", "model: m\n    keys: x", "unknown_key", 13, "judges.0.keys"),
        ("pairs/tiny.toml", "3", "bad_value", 7, "retrievers.1.pair"),
        ("kind: bm25", "kind: bm52", "bad_value", 5, "retrievers.0"),
        ("output: out", "seed: 0", "missing_key", 1, "output"),
        ("http://localhost", "localhost", "bad_value", 11, "judges.0.base_url"),
        ("name: other", "name: bm25", "bad_value", None, ""),
        ("output: out", "output: [", "not_yaml", None, None),
        ("output: out", "output: " + "[" * 100_000, "not_yaml", None, None),
        ("output: out", "output: " + "1" * 10_000, "not_yaml", None, None),
    ],
)
def test_a_wrong_key_is_named_with_its_line(
    tmp_path: Path, old: str, new: str, code: str, line: int | None, key: str | None
) -> None:
    assert old in GOOD
    path = write(tmp_path, GOOD.replace(old, new))
    with raises(CareError, code=code, path=path, line=line, key=key):
        load_config(path, BenchmarkConfig)


def test_annotation_takes_one_judge(tmp_path: Path) -> None:
    second = "  - {name: two, base_url: 'http://h/v1', model: m}\n"
    with raises(CareError, code="bad_value", key="judges"):
        load_config(write(tmp_path, GOOD + second), AnnotationConfig)


@pytest.mark.parametrize("text", ["", "- a\n", "text"])
def test_a_file_without_keys(tmp_path: Path, text: str) -> None:
    with raises(CareError, code="no_keys"):
        load_config(write(tmp_path, text), BenchmarkConfig)


def test_a_missing_file(tmp_path: Path) -> None:
    with raises(DataError, code="unreadable", path=tmp_path / "none.yaml"):
        load_config(tmp_path / "none.yaml", BenchmarkConfig)
