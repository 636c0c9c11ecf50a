from pathlib import Path

import pytest
import yaml

import care
from core.errors import CareError
from tests.conftest import write_jsonl
from tests.errors import raises

pytestmark = pytest.mark.train


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe that trains a tiny pair with two seeds."""
    from tests.checkpoints import MAX_LENGTH, TEXTS, write_bert

    records = [{"query": text, "positives": [text]} for text in TEXTS]
    triples = write_jsonl(tmp_path / "triples.jsonl", records)
    side = {
        "start": str(write_bert(tmp_path / "bert")),
        "pooling": "cls",
        "max_length": MAX_LENGTH,
    }
    facts = {
        "name": "tiny",
        "seeds": [0, 1],
        "query": side,
        "document": side,
        "stages": [{"kind": "joint", "data": [{"triples": str(triples)}], "batch": 4}],
    }
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(facts), encoding="utf-8")
    return path


def test_a_trained_pair_is_loaded_and_encodes(recipe: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    folder = care.train(recipe, out=tmp_path / "out", changes=["seeds=[1]"], report=lines.append)
    assert folder == tmp_path / "out" / "runs" / "tiny-seed1"
    assert any("joint" in line for line in lines)
    pair = care.load_pair(str(folder / "pair.toml"))
    assert pair.encode_queries(["发热"]).shape == (1, pair.dimension)
    assert pair.encode_documents([{"title": "发热", "text": "多喝水"}]).shape == (1, pair.dimension)


def test_missing_packages_are_named(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("care.extras.missing", lambda _: ["peft"])
    with raises(CareError, "not_installed", packages=["peft"]):
        care.train(recipe)
