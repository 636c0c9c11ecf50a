from collections.abc import Iterator
from pathlib import Path

import pytest

from service.settings import Settings
from tests.engines.distributed.milvus_server import MilvusServer, run_milvus


@pytest.fixture(scope="session")
def shared_milvus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MilvusServer]:
    """A Milvus that is shared by all tests that do not stop it."""
    with run_milvus(tmp_path_factory.mktemp("milvus") / "data") as server:
        yield server


@pytest.fixture
def milvus(shared_milvus: MilvusServer) -> Iterator[MilvusServer]:
    """A Milvus without collections."""
    yield shared_milvus
    with shared_milvus.client() as client:
        for collection in client.list_collections():
            client.drop_collection(collection)


@pytest.fixture
def own_milvus(tmp_path: Path) -> Iterator[MilvusServer]:
    """A Milvus that the test can kill."""
    with run_milvus(tmp_path / "milvus") as server:
        yield server


def milvus_settings(indexes: Path, uri: str) -> Settings:
    return Settings(
        indexes=indexes,
        index="test",
        store="milvus",
        milvus_uri=uri,
        milvus_timeout_ms=1000,
        cache_entries=0,
        threads=1,
        watch_seconds=0,
        channel_timeout_ms=5000,
    )
