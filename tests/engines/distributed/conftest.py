import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.settings import Settings
from tests.engines.distributed.milvus_server import MilvusAt, MilvusServer, run_milvus


@pytest.fixture(scope="session")
def shared_milvus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MilvusAt]:
    """A Milvus that is shared by all tests that do not stop it.

    It is milvus-lite, or the server that CARE_TEST_MILVUS_URI names.
    """
    if uri := os.environ.get("CARE_TEST_MILVUS_URI"):
        server = MilvusAt(uri)
        server.clear()
        yield server
        return
    with run_milvus(tmp_path_factory.mktemp("milvus") / "data") as server:
        yield server


@pytest.fixture
def milvus(shared_milvus: MilvusAt) -> Iterator[MilvusAt]:
    """A Milvus without collections."""
    yield shared_milvus
    shared_milvus.clear()


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
