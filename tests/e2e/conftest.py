from collections.abc import Iterator
from pathlib import Path

import pytest

from core.service_process import running_service
from indexer.__main__ import main

ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / "data" / "sample"


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `indexes` and `builds` of the sample corpus, by the embedded pair."""
    folder = tmp_path_factory.mktemp("e2e")
    arguments = ["build", "--corpus", str(SAMPLE / "corpus.jsonl"), "--index", "sample"]
    folders = ["--indexes", str(folder / "indexes"), "--builds", str(folder / "builds")]
    assert main([*arguments, *folders]) == 0
    return folder


@pytest.fixture(scope="session")
def indexes(built: Path) -> Path:
    """The folder of its indexes."""
    return built / "indexes"


@pytest.fixture(scope="session")
def url(indexes: Path) -> Iterator[str]:
    """The address of the real service over the sample corpus."""
    with running_service(indexes, "sample") as service:
        yield service.url
