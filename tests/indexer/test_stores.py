import sys
from pathlib import Path

import pytest

from core.errors import CareError, ProviderError
from indexer.__main__ import main
from indexer.milvus_factory import index_parameters, parameters_by_cost
from indexer.stores import MilvusAddress, check_factory, choose_factory, open_milvus
from tests.conftest import make_records, write_jsonl


@pytest.mark.parametrize(("count", "factory"), [(49_999, "Flat"), (50_000, "HNSW32")])
def test_milvus_searches_few_vectors_exactly_and_many_by_a_graph(count: int, factory: str) -> None:
    assert choose_factory("milvus", count, 768) == factory
    check_factory("milvus", factory, 768, count)
    assert choose_factory("milvus", 10**9, 768) == "HNSW32"
    assert choose_factory("faiss", 10**9, 768).startswith("IVF")


@pytest.mark.parametrize("factory", ["HNSW3", "HNSW32,SQ8", "IVF1024,SQ8", "flat", ""])
def test_what_milvus_does_not_build_is_refused(factory: str) -> None:
    with pytest.raises(CareError, match=f"factory '{factory}' is not built in Milvus: use Flat"):
        check_factory("milvus", factory, 768)


def test_a_factory_is_an_index_type_of_milvus() -> None:
    assert index_parameters("Flat") == ("FLAT", {})
    assert index_parameters("HNSW16,Flat") == ("HNSW", {"M": 16, "efConstruction": 200})
    assert parameters_by_cost("Flat") == [{}]
    assert parameters_by_cost("HNSW16")[0] == {"efSearch": 16}


def test_a_missing_client_or_address_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CareError, match="need its address: --milvus-uri, or CARE_MILVUS_URI"):
        open_milvus(None)
    monkeypatch.setitem(sys.modules, "pymilvus", None)
    monkeypatch.delitem(sys.modules, "indexer.milvus_store", raising=False)
    with pytest.raises(ProviderError, match=r"need pymilvus: pip install 'care-retrieval\[distri"):
        open_milvus(MilvusAddress("http://127.0.0.1:1"))


def test_a_token_is_not_shown() -> None:
    assert "hidden" not in repr(MilvusAddress("http://m", "hidden"))


def test_a_build_for_milvus_without_address_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CARE_MILVUS_URI", raising=False)
    corpus = write_jsonl(tmp_path / "corpus.jsonl", make_records(3))
    place = ["--indexes", str(tmp_path / "indexes"), "--builds", str(tmp_path / "builds")]
    command = ["build", "--corpus", str(corpus), "--index", "test", *place, "--store", "milvus"]
    assert main(command) == 1
    assert "error: vectors in Milvus need its address" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.jsonl"]
