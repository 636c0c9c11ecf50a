import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import care
from core.service_process import running_service
from tests.conftest import ADMIN_KEY, SEARCH_KEY

ROOT = Path(__file__).parents[3]
QUERY = "血压高的人平时吃饭要注意什么？"
DEPARTMENT = "心血管科"
KEY = "asks"  # of SEARCH_KEY


def pytest_configure(config: pytest.Config) -> None:
    """The tests of LangChain have coroutines without a mark."""
    config.option.asyncio_mode = "auto"


@pytest.fixture(scope="session")
def indexes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an index of a part of the sample corpus, encoded with care-mini."""
    folder = tmp_path_factory.mktemp("indexes")
    lines = (ROOT / "data" / "sample" / "corpus.jsonl").read_text("utf-8").splitlines()
    documents = [json.loads(line) for line in lines[:60]]
    care.build_index("sample", documents, indexes=folder / "indexes", builds=folder / "builds")
    return folder / "indexes"


@pytest.fixture(scope="session")
def url(indexes: Path) -> Iterator[str]:
    """The address of the real service, which needs a key."""
    keys = f"{ADMIN_KEY},{SEARCH_KEY}"
    with running_service(indexes, "sample", API_KEYS=keys) as service:
        yield service.url


@pytest.fixture(scope="session")
def open_url(indexes: Path) -> Iterator[str]:
    """The address of the real service without keys."""
    with running_service(indexes, "sample") as service:
        yield service.url
