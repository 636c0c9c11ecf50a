from collections.abc import Iterator
from pathlib import Path

import pytest

from care.cli.main import main
from core.service_process import running_service

ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / "data" / "sample"


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `indexes` and `builds` of the sample corpus, built with `care-mini`."""
    folder = tmp_path_factory.mktemp("e2e")
    arguments = ["index", str(SAMPLE / "corpus.jsonl"), "--index", "sample"]
    folders = ["--indexes", str(folder / "indexes"), "--builds", str(folder / "builds")]
    assert main([*arguments, *folders]) == 0
    return folder


@pytest.fixture(scope="session")
def indexes(built: Path) -> Path:
    """The folder of indexes."""
    return built / "indexes"


@pytest.fixture(scope="session")
def url(indexes: Path) -> Iterator[str]:
    """The address of the real service with the index of the sample corpus."""
    with running_service(indexes, "sample") as service:
        yield service.url
