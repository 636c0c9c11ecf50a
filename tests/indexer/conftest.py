from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from core.versions import IndexFolder
from indexer.build import BuildOptions
from tests.conftest import Builder, make_records, write_jsonl
from tests.indexer.builds import build_options

OptionsMaker = Callable[..., BuildOptions]


@pytest.fixture
def options(tmp_path: Path) -> OptionsMaker:
    """Writes records as a corpus and returns the options to build it."""

    def make(records: list[dict[str, Any]], **changes: Any) -> BuildOptions:
        return build_options(tmp_path, write_jsonl(tmp_path / "corpus.jsonl", records), **changes)

    return make


@pytest.fixture
def published(build_version: Builder, indexes: Path) -> Path:
    """The folder of a published version with 60 documents."""
    return IndexFolder(indexes, "test").path / build_version(make_records(60)).version
