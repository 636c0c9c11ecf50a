from collections.abc import Iterator
from pathlib import Path

import pytest

from indexer.__main__ import main
from tests.conftest import ADMIN_KEY
from tests.service_process import run_service

ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / "data" / "sample"


@pytest.fixture(scope="session")
def indexes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sample corpus, indexed by the embedded pair."""
    folder = tmp_path_factory.mktemp("e2e")
    arguments = ["build", "--corpus", str(SAMPLE / "corpus.jsonl"), "--index", "sample"]
    folders = ["--indexes", str(folder / "indexes"), "--builds", str(folder / "builds")]
    assert main([*arguments, *folders]) == 0
    return folder / "indexes"


@pytest.fixture(scope="session")
def url(indexes: Path) -> Iterator[str]:
    """The address of the real service over the sample corpus."""
    with run_service(indexes, "sample", API_KEYS=ADMIN_KEY) as address:
        yield address
