from pathlib import Path

import pytest

from care.cli.main import main
from tests.conftest import make_records, write_jsonl


@pytest.fixture(scope="package")
def indexes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with index 'test', built from 8 documents with care-mini."""
    folder = tmp_path_factory.mktemp("live")
    corpus = write_jsonl(folder / "corpus.jsonl", make_records(8))
    arguments = ["index", str(corpus), "--index", "test"]
    folders = ["--indexes", str(folder / "indexes"), "--builds", str(folder / "builds")]
    assert main([*arguments, *folders]) == 0
    return folder / "indexes"
