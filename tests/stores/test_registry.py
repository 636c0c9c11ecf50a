import pickle
import sys
from pathlib import Path

import pytest

from care.cli.main import main
from core.errors import CareError, ProviderError
from stores import registry
from stores.faiss.store import FaissStore
from stores.milvus.names import (
    check_factory,
    default_factory,
    index_parameters,
    parameters_by_cost,
)
from stores.registry import MilvusAddress, VectorStores
from tests.conftest import make_records, write_jsonl
from tests.errors import error_code, raises


@pytest.mark.parametrize(("count", "factory"), [(49_999, "Flat"), (50_000, "HNSW32")])
def test_milvus_searches_few_vectors_exactly_and_many_by_a_graph(count: int, factory: str) -> None:
    assert default_factory(count, count) == factory
    check_factory(factory)
    assert default_factory(10**9, 10**9) == "HNSW32"
    assert default_factory(10**9, 10**7) == "Flat"
    assert registry.default_factory("faiss", 10**9, 768, 10**9).startswith("IVF")


def test_both_defaults_of_a_version_are_defaults() -> None:
    found = registry.default_factories("faiss", 20_000, 384, 10_000)
    assert found == {"HNSW32,Flat", "IVF512,Flat"}
    # A choice of the user stays one.
    assert registry.default_factories("milvus", 50_000, 384, 40_000) == {"HNSW32"}


@pytest.mark.parametrize("factory", ["HNSW3", "HNSW32,SQ8", "IVF1024,SQ8", "flat", ""])
def test_an_unsupported_index_type_of_milvus_is_an_error(factory: str) -> None:
    with raises(CareError, "unsupported_factory", factory=factory):
        check_factory(factory)


def test_a_factory_is_converted_to_an_index_type_of_milvus() -> None:
    assert index_parameters("Flat") == ("FLAT", {})
    assert index_parameters("HNSW16,Flat") == ("HNSW", {"M": 16, "efConstruction": 200})
    assert parameters_by_cost("Flat") == [{}]
    assert parameters_by_cost("HNSW16")[0] == {"efSearch": 16}


def test_a_missing_client_or_address_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with raises(CareError, "milvus_address_missing"):
        VectorStores().get("milvus")
    monkeypatch.setitem(sys.modules, "pymilvus", None)
    monkeypatch.delitem(sys.modules, "stores.milvus.store", raising=False)
    with raises(ProviderError, "not_installed", package="pymilvus"):
        VectorStores(MilvusAddress("http://127.0.0.1:1")).get("milvus")


def test_stores_are_sent_to_other_processes() -> None:
    stores = pickle.loads(pickle.dumps(VectorStores(MilvusAddress("http://127.0.0.1:1"))))
    assert isinstance(stores.get("faiss"), FaissStore)


def test_the_store_of_a_version_is_found(tmp_path: Path) -> None:
    stores = VectorStores()
    folder = tmp_path / "test" / "1"
    folder.mkdir(parents=True)
    assert isinstance(stores.for_version(folder), FaissStore)
    (folder / "vectors.milvus").write_text("care_test__1\n", encoding="ascii")
    with raises(CareError, "milvus_address_missing"):
        stores.for_version(folder)


def test_a_token_is_not_in_the_repr() -> None:
    assert "hidden" not in repr(MilvusAddress("http://m", "hidden"))


def test_a_build_for_milvus_without_address_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CARE_MILVUS_URI", raising=False)
    corpus = write_jsonl(tmp_path / "corpus.jsonl", make_records(3))
    place = ["--indexes", str(tmp_path / "indexes"), "--builds", str(tmp_path / "builds")]
    command = ["index", str(corpus), "--index", "test", *place, "--store", "milvus"]
    assert main(command) == 1
    assert error_code(capsys.readouterr().err) == "milvus_address_missing"
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.jsonl"]
