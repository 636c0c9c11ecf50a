import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from core.encoders import EncoderSpec
from core.versions import index_folder
from indexer.build import BuildOptions
from tests.conftest import Builder, make_records, write_jsonl
from tests.encoders import BigramEncoder, make_spec
from tests.indexer.builds import build_options

OptionsMaker = Callable[..., BuildOptions]


@pytest.fixture
def options(tmp_path: Path) -> OptionsMaker:
    """Writes records as the corpus and returns the options to build it."""

    def make(records: list[dict[str, Any]], **changes: Any) -> BuildOptions:
        return build_options(tmp_path, write_jsonl(tmp_path / "corpus.jsonl", records), **changes)

    return make


@pytest.fixture
def indexes(tmp_path: Path) -> Path:
    """The folder that all builds of a test publish in."""
    return tmp_path / "indexes"


@pytest.fixture
def published(build_version: Builder, indexes: Path) -> Path:
    """The folder of a whole version with 60 documents."""
    return index_folder(indexes, "test") / build_version(make_records(60)).version


@pytest.fixture
def pair_file(tmp_path: Path) -> Path:
    """A pair of test encoders, as a file that a command can name."""
    lines = ['name = "bigrams"', 'description = "d"', 'embedding_space = "bigrams-1"']
    for role in ("query", "document"):
        facts = make_spec(role).model_dump(exclude={"role", "embedding_space"})
        lines += [f"[{role}]", *(f"{key} = {json.dumps(value)}" for key, value in facts.items())]
    path = tmp_path / "bigrams.toml"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture
def test_encoders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the commands use the test encoder where they would load a model."""

    def load(spec: EncoderSpec, folder: Path, threads: int) -> BigramEncoder:
        return BigramEncoder(spec.role, spec.embedding_space)

    monkeypatch.setattr("models.encoders.factory.OnnxEncoder", load)
