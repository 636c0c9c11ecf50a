"""Systems on splits of one corpus."""

import json
from functools import partial
from pathlib import Path

import pytest

from core.errors import CareError, DataError
from evaluation.beir import (
    beir_paths,
    document_texts,
    read_documents,
    read_judged_queries,
    write_split,
)
from evaluation.bm25 import bm25_run
from evaluation.cmedteb import splits
from evaluation.cmedteb.evaluate import PairModel, load_systems
from evaluation.cmedteb.splits import compare_on_splits, is_asymmetric
from evaluation.metrics import NDCG_10, score_queries
from models.pairs import load_pair
from tests.conftest import write_jsonl
from tests.errors import raises
from tests.evaluation.cmedteb.data import Encoders

pytestmark = pytest.mark.train

TEXTS = ["高血压少盐饮食", "骨折固定患肢", "儿童发热多饮水", "糖尿病监测血糖", "哮喘吸入药物"]
ASKED = {"q0": "高血压饮食", "q1": "骨折固定", "q2": "儿童发热"}
SPOKEN = {"q0": "血压高了吃饭咋整", "q1": "骨折固定", "q2": "我们家小朋友身上烫"}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    corpus = [{"_id": f"d{i}", "title": "", "text": text} for i, text in enumerate(TEXTS)]
    write_jsonl(folder / "corpus.jsonl", corpus)
    for split, queries in {"held-asked": ASKED, "held-spoken": SPOKEN}.items():
        write_split(folder, split, queries, {f"q{i}": {f"d{i}": 1} for i in range(3)})
    return folder


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splits, "_TIMED", 32)
    monkeypatch.setattr(splits, "_ROUNDS", 1)


def test_scores_differences_losses_and_sizes(data: Path, tmp_path: Path) -> None:
    encoders, out = Encoders(), tmp_path / "out"
    load = partial(load_systems, cache=tmp_path / "cache", load=encoders.load)
    names = ["held-asked", "held-spoken"]
    result, table = compare_on_splits(load(["care-mini", "bm25"]), data, names, out)
    assert (out / "splits.md").read_text("utf-8") == table
    assert json.loads((out / "splits.json").read_text("utf-8")) == result

    mini, bm25 = result["systems"]
    expected = {}
    documents = read_documents(data / "corpus.jsonl")
    for split in names:
        queries, qrels = read_judged_queries(*beir_paths(data, split)[1:])
        values = score_queries(NDCG_10, qrels, bm25_run(documents, queries, 10))
        expected[split] = sum(values.values()) / 3
        assert bm25["splits"][split]["ndcg@10"]["value"] == pytest.approx(expected[split])
        assert mini["splits"][split]["difference"]["value"] == 0
        difference = bm25["splits"][split]["difference"]
        mean = mini["splits"][split]["ndcg@10"]["value"]
        assert difference["value"] == pytest.approx(expected[split] - mean)
        assert difference["low"] <= difference["value"] <= difference["high"]
    loss = 1 - expected["held-spoken"] / expected["held-asked"]
    assert bm25["loss"] == {"held": pytest.approx(loss)} and loss > 0
    assert result["queries"] == {"held-asked": 3, "held-spoken": 3}

    folder = load_pair("care-mini").folder / "../care-mini"
    sizes = [(folder / name).stat().st_size for name in ("query.onnx", "tokenizer.json")]
    assert mini["query_bytes"] == sum(sizes) and bm25["query_bytes"] is None
    assert mini["microseconds"] > 0 and mini["queries_per_second"] > 0
    assert f"{100 * loss:.0f} %" in table


def test_a_pair_with_the_same_document_encoder_encodes_queries_only(
    data: Path, tmp_path: Path
) -> None:
    pair = load_pair("care-mini")
    query = pair.query.model_copy(update={"revision": "another", "embedding_space": "s"})
    document = pair.document.model_copy(
        update={"weights": f"{pair.folder}/{pair.document.weights}", "embedding_space": "s"}
    )
    other = pair.model_copy(update={"name": "other", "query": query, "document": document})
    encoders = Encoders()
    systems = [PairModel(p, tmp_path / "cache", load=encoders.load) for p in (pair, other)]
    compare_on_splits(systems, data, ["held-asked"], tmp_path / "out")
    documents = [*document_texts(read_documents(data / "corpus.jsonl")).values()]
    encoded = [(e.spec.role, e.spec.embedding_space, sorted(e.texts)) for e in encoders.made]
    asked = sorted(ASKED.values())
    assert encoded == [
        ("document", "care-mini-2", sorted(documents)),
        ("query", "care-mini-2", asked),
        ("query", "s", asked),
    ]


def test_missing_splits_and_splits_without_relevant_documents(data: Path, tmp_path: Path) -> None:
    out, systems = tmp_path / "out", load_systems(["bm25"], tmp_path / "cache")
    with raises(DataError, code="unreadable", path=data / "qrels" / "none.tsv"):
        compare_on_splits(systems, data, ["none"], out)
    (data / "held-asked.qrels.tsv").write_text("q0\td0\t0\n", "utf-8")
    with raises(CareError, code="no_relevant_document", task="held-asked"):
        compare_on_splits(systems, data, ["held-asked"], out)
    assert not out.exists()


def test_a_pair_of_two_models_is_asymmetric() -> None:
    pairs = [load_pair(name) for name in ("care-mini", "qwen3-embedding-4b", "bge-m3")]
    assert [is_asymmetric(pair) for pair in pairs] == [True, False, False]
