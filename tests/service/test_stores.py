import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from core.errors import IndexVersionError, ProviderError
from core.types import FloatArray, IndexManifest
from service.breaker import UnavailableError
from service.loaded_index import load_index
from service.settings import Settings
from service.stores import FaissFiles, open_store
from tests.encoders import BigramEncoder
from tests.service.conftest import Serve


def test_files_are_the_default() -> None:
    assert isinstance(open_store(Settings()), FaissFiles)


def test_a_missing_client_of_milvus_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pymilvus", None)
    monkeypatch.delitem(sys.modules, "service.milvus_search", raising=False)
    with pytest.raises(ProviderError, match=r"needs pymilvus: pip install 'care-retrieval\[distr"):
        open_store(Settings(store="milvus", milvus_uri=SecretStr("http://127.0.0.1:1")))


def test_a_version_in_milvus_is_not_looked_for_in_files(
    settings: Settings, folder: Path, manifest: IndexManifest
) -> None:
    (folder / "vectors.milvus").write_text("care_test__1\n", encoding="ascii")
    with pytest.raises(IndexVersionError, match="set CARE_STORE=milvus and CARE_MILVUS_URI"):
        load_index(settings.indexes, "test", BigramEncoder())


def test_vectors_that_cannot_be_searched_now_are_503(
    serve: Serve, manifest: IndexManifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = serve()

    def search(self: object, query: FloatArray, *_: Any) -> Any:
        raise UnavailableError

    monkeypatch.setattr("service.vector_search.VectorIndex.search", search)
    for path, body in (
        ("/search", {"query": "发热"}),
        ("/search/batch", {"queries": [{"query": "发热"}, {"query": "骨折"}]}),
    ):
        answer = client.post(path, json=body)
        assert answer.status_code == 503
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["detail"] == "the vectors cannot be searched now: try again"
