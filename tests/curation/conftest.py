from pathlib import Path
from typing import Any

import pytest

from core.types import Document
from evaluation.beir import write_beir

DOCUMENTS = {
    "d1": "高血压患者可以吃党参，但要注意血压变化。",
    "d2": "高血压患者应当少盐饮食，按时服药。",
    "d3": "骨折以后要固定，并且尽快到医院拍片。",
    "d4": "儿童发烧先物理降温，超过三十八度五再用药。",
    "d5": "党参有补气的作用，高血压的人吃之前先问医生。",
}
QUERIES = {"q1": "高血压能不能吃党参？", "q2": "孩子发烧怎么办"}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A BEIR folder of five documents and two queries, and one wrong judgement."""
    documents = [Document(id_, text) for id_, text in DOCUMENTS.items()]
    qrels = {"q1": {"d1": 1, "d3": 1}, "q2": {"d4": 1}}
    write_beir(tmp_path / "data", "test", documents, QUERIES, qrels)
    return tmp_path / "data"


@pytest.fixture
def facts(data: Path, tmp_path: Path) -> dict[str, Any]:
    """The keys that the configurations of the judging commands share."""
    return {
        "corpus": data / "corpus.jsonl",
        "queries": data / "queries.jsonl",
        "output": tmp_path / "out",
        "retrievers": [{"kind": "bm25"}],
        "passages_per_call": 2,
    }
