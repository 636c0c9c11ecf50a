from pathlib import Path

import pytest

from core.errors import CareError
from models.curation.config import AnnotationConfig, BenchmarkConfig, load_config

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
    ("old", "new", "message"),
    [
        ("output: out", "output: out\nsede: 3", r"config.yaml line 4: sede: Extra inputs"),
        ("model: m", "modle: m", r"line 10: judges.0.model: Field required"),
        ("model: m", "model: m\n    keys: x", r"line 13: judges.0.keys: Extra inputs"),
        ("pairs/tiny.toml", "3", r"line 7: retrievers.1.pair: Input should be a valid string"),
        ("kind: bm25", "kind: bm52", r"line 5: retrievers.0: Input tag 'bm52'"),
        ("output: out", "seed: 0", r"config.yaml line 1: output: Field required"),
        ("http://localhost", "localhost", r"line 11: judges.0.base_url: String should match"),
        ("name: other", "name: bm25", r"config.yaml: two retrievers are named 'bm25'"),
        ("output: out", "output: [", r"config.yaml is not valid YAML: .*line [45]"),
    ],
)
def test_a_wrong_key_is_named_with_its_line(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    assert old in GOOD
    with pytest.raises(CareError, match=message):
        load_config(write(tmp_path, GOOD.replace(old, new)), BenchmarkConfig)


def test_annotation_takes_one_judge(tmp_path: Path) -> None:
    second = "  - {name: two, base_url: 'http://h/v1', model: m}\n"
    with pytest.raises(CareError, match="judges: annotation takes one judge"):
        load_config(write(tmp_path, GOOD + second), AnnotationConfig)


@pytest.mark.parametrize("text", ["", "- a\n", "text"])
def test_a_file_without_keys(tmp_path: Path, text: str) -> None:
    with pytest.raises(CareError, match="holds no keys"):
        load_config(write(tmp_path, text), BenchmarkConfig)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CareError, match=r"none.yaml cannot be read: No such file"):
        load_config(tmp_path / "none.yaml", BenchmarkConfig)
