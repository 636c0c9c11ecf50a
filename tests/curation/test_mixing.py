import json
from pathlib import Path
from typing import Any

import pytest

from core.errors import CareError
from core.records import read_jsonl
from core.types import Document
from curation.config import MixConfig
from curation.mixing import mix
from evaluation.beir import read_documents, read_qrels, read_queries, write_beir
from tests.conftest import write_jsonl
from tests.errors import raises


@pytest.fixture
def facts(tmp_path: Path) -> dict[str, Any]:
    """Sources of all kinds; one query is in two of them, and others are held out."""
    documents = [Document(f"d{i}", f"第{i}段", "题" if i == 1 else "") for i in range(4)]
    queries = {f"q{i}": f"问题 {i}" for i in range(4)}
    splits = {
        "train": {"q0": {"d0": 1, "d1": 0}, "q1": {"d1": 1, "d2": -1}},
        "dev": {"q2": {"d2": 1, "d3": -1}},
        "test": {"q3": {"d3": 1}},
    }
    for split, qrels in splits.items():
        write_beir(tmp_path / "beir", split, documents, queries, qrels)
    triples = [
        {
            "query": "问题  0",
            "positives": ["甲", {"title": "题", "text": "第1段"}],
            "negatives": ["第0段", "乙"],
        },
        {"query": "问题 3", "positives": ["甲"], "negatives": ["乙"]},
        {"query": "问题 9", "positives": [], "negatives": ["乙"]},
    ]
    sts = [
        {"text1": "问题 5", "text2": "同", "label": 1},
        {"text1": "问题 5", "text2": "异", "label": 0},
        {"text1": "问题 6", "text2": "异", "label": 0},
    ]
    return {
        "output": tmp_path / "out",
        "sources": [
            {
                "kind": "triples",
                "name": "annotated",
                "path": write_jsonl(tmp_path / "t.jsonl", triples),
            },
            {"kind": "beir", "name": "retrieval", "path": tmp_path / "beir", "split": "train"},
            {"kind": "sts", "name": "sts", "path": write_jsonl(tmp_path / "s.jsonl", sts)},
        ],
        "dev": {"path": tmp_path / "beir", "split": "dev"},
        "held_out": [{"path": tmp_path / "beir", "split": "test"}],
    }


def mixed(facts: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    report = mix(MixConfig.model_validate(facts))
    path = Path(facts["output"]) / "fine-tuning.jsonl"
    return report, [record for _, record in read_jsonl(path)]


def test_equal_queries_become_one_and_held_out_ones_are_dropped(facts: dict[str, Any]) -> None:
    report, rows = mixed(facts)
    found = {row["query"]: (row["positives"], row["negatives"]) for row in rows}
    assert found == {
        # A positive of one source is a negative of none.
        "问题 0": (["甲", "题\n第1段", "第0段"], ["乙"]),
        "问题 1": (["题\n第1段"], []),
        "问题 5": (["同"], ["异"]),
    }
    assert (report["triples"], report["merged"], report["dev"]) == (3, 1, 1)
    assert report["sources"]["annotated"]["held_out"] == 1
    assert report["sources"]["sts"]["read"] == 1
    assert json.loads((facts["output"] / "fine-tuning.report.json").read_text("utf-8")) == report


def test_the_folder_of_dev_has_its_split(facts: dict[str, Any]) -> None:
    mixed(facts)
    dev = facts["output"] / "dev"
    assert read_queries(dev / "queries.jsonl") == {"q2": "问题 2"}
    assert read_qrels(dev / "qrels" / "dev.tsv") == {"q2": {"d2": 1, "d3": -1}}
    assert len(read_documents(dev / "corpus.jsonl")) == 4


def test_samples_and_order_depend_on_the_seed_alone(facts: dict[str, Any], tmp_path: Path) -> None:
    triples = [
        {"query": f"问 {i}", "positives": [f"答 {i}"], "negatives": ["无"]} for i in range(40)
    ]
    source = {"kind": "triples", "name": "t", "path": write_jsonl(tmp_path / "many.jsonl", triples)}
    facts["sources"] = [source | {"limit": 20}]
    (report, first), (_, again), (_, other) = (mixed(facts | {"seed": seed}) for seed in (0, 0, 1))
    assert first == again
    assert {row["query"] for row in first} != {row["query"] for row in other}
    assert [row["query"] for row in first] != sorted(row["query"] for row in first)
    assert (report["triples"], report["sources"]["t"]["read"]) == (20, 40)


def test_a_mix_without_triples_is_an_error(facts: dict[str, Any], tmp_path: Path) -> None:
    empty = write_jsonl(tmp_path / "t.jsonl", [{"query": "问题 3", "positives": ["甲"]}])
    facts["sources"] = [{"kind": "triples", "name": "t", "path": empty}]
    with raises(CareError, code="no_triples", path=facts["output"]):
        mixed(facts)
