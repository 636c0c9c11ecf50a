from pathlib import Path
from typing import Any

import pytest

from core.errors import CareError, DataError
from evaluation.cmedteb.tasks import (
    TASKS,
    RankingData,
    find_tasks,
    read_instructions,
    read_reranking,
    read_retrieval,
    read_sts,
    task,
)
from tests.conftest import write_jsonl
from tests.errors import raises
from tests.evaluation.cmedteb.data import write_data


def write_beir(folder: Path, qrels: str = "q1\td1\t1\n") -> Path:
    write_jsonl(
        folder / "corpus.jsonl",
        [{"_id": "d1", "title": "骨折", "text": "固定\u2028患肢"}, {"_id": "d2", "text": "少盐"}],
    )
    write_jsonl(
        folder / "queries.jsonl",
        [{"_id": "q1", "text": " 骨折 怎么办 "}, {"_id": "q2", "text": "未判"}],
    )
    (folder / "qrels").mkdir()
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + qrels, "utf-8")
    return folder


def test_texts_of_a_beir_folder_are_normalised(tmp_path: Path) -> None:
    data = read_retrieval(write_beir(tmp_path), "test")
    assert data.corpus == {"d1": "骨折\n固定 患肢", "d2": "少盐"}
    assert data.queries == {"q1": "骨折 怎么办"}
    assert data.qrels == {"q1": {"d1": 1}}
    assert data.candidates is None


def test_a_reranking_query_orders_its_own_candidates(tmp_path: Path) -> None:
    path = write_jsonl(
        tmp_path / "rerank.jsonl",
        [
            {"query": "头痛", "positives": ["休息"], "negatives": ["骨折固定", "少盐"]},
            {"_id": 7, "query": "高血压", "positives": ["少盐"], "negatives": ["休息"]},
        ],
    )
    data = read_reranking(path)
    assert len(data.corpus) == 3
    assert [data.corpus[id_] for id_ in (data.candidates or {})["q1"]] == [
        "休息",
        "骨折固定",
        "少盐",
    ]
    assert list(data.qrels["7"].values()) == [1, 0]


@pytest.mark.parametrize(
    ("record", "code", "field"),
    [
        ({"query": "a", "positives": ["b"]}, "bad_field", "negatives"),
        ({"query": "a", "positives": "b", "negatives": []}, "bad_field", "positives"),
        ({"query": "a", "positives": [3], "negatives": []}, "bad_field", "positives"),
        ({"query": 3, "positives": ["b"], "negatives": []}, "bad_field", "query"),
        ({"query": "a", "positives": [], "negatives": ["b"]}, "no_positives", "positives"),
        ({"query": "a", "positives": ["b"], "negatives": ["b "]}, "positive_is_negative", None),
        ([], "not_json", None),
    ],
)
def test_a_wrong_line_of_reranking_is_named(
    tmp_path: Path, record: Any, code: str, field: str | None
) -> None:
    path = write_jsonl(tmp_path / "rerank.jsonl", [record])
    with raises(DataError, code=code, path=path, line=1, field=field):
        read_reranking(path)


def test_a_file_or_folder_without_tasks(tmp_path: Path) -> None:
    with raises(DataError, code="no_queries", path=tmp_path / "rerank.jsonl"):
        read_reranking(write_jsonl(tmp_path / "rerank.jsonl", []))
    with raises(CareError, code="no_tasks", path=tmp_path / "none"):
        find_tasks(str(tmp_path / "none"), "test")


def test_two_reranking_queries_of_one_id(tmp_path: Path) -> None:
    record = {"_id": "x", "query": "头痛", "positives": ["休息"], "negatives": []}
    path = write_jsonl(tmp_path / "rerank.jsonl", [record, record])
    with raises(DataError, code="duplicate_id", line=2, id="x"):
        read_reranking(path)


def test_sts_needs_labels_that_differ(tmp_path: Path) -> None:
    pairs = [{"text1": "a", "text2": "b", "label": 1}, {"text1": "a", "text2": "c", "label": 1}]
    with raises(DataError, code="equal_labels"):
        read_sts(write_jsonl(tmp_path / "sts.jsonl", pairs))


@pytest.mark.parametrize(
    ("change", "field"),
    [({"text1": None}, "text1"), ({"label": None}, "label"), ({"label": "1"}, "label")],
)
def test_a_wrong_line_of_sts_is_named(tmp_path: Path, change: dict[str, Any], field: str) -> None:
    record = {"text1": "a", "text2": "b", "label": 1} | change
    with raises(DataError, code="bad_field", line=1, field=field):
        read_sts(write_jsonl(tmp_path / "sts.jsonl", [record]))


def test_tasks_are_found_by_their_files(tmp_path: Path) -> None:
    write_beir(tmp_path / "retrieval")
    write_jsonl(tmp_path / "rerank" / "test.jsonl", [])
    write_jsonl(tmp_path / "sts.jsonl", [])
    names = [known.name for known in find_tasks(str(tmp_path), "test")]
    assert names == ["retrieval", "rerank", "sts"]
    assert [t.name for t in find_tasks(str(tmp_path / "retrieval"), "test")] == ["retrieval"]


def test_a_beir_folder_may_hold_other_tasks_too(tmp_path: Path) -> None:
    write_jsonl(write_beir(tmp_path) / "sts.jsonl", [])
    found = find_tasks(str(tmp_path), "test")
    assert {known.name for known in found} == {"retrieval", "sts"}
    data = found[task("retrieval")]()
    assert isinstance(data, RankingData) and data.qrels == {"q1": {"d1": 1}}
    assert found[task("retrieval")]() is data


def test_tasks_on_the_hub() -> None:
    names = [known.name for known in find_tasks("hub", "test")]
    assert names == ["cmedqa-v1", "cmedqa-v2", "cmedqa-retrieval", "medical-retrieval"]
    assert len(find_tasks("hub", "test", "someone/CMedTEB")) == 7


def test_a_file_replaces_instructions(tmp_path: Path) -> None:
    path = tmp_path / "instructions.toml"
    path.write_text('retrieval = "Find the answer."\n', encoding="utf-8")
    source, own = str(write_beir(tmp_path)), read_instructions(path)
    (known,) = find_tasks(source, "test", instructions=own)
    assert known.instruction == "Find the answer."
    (known,) = find_tasks(source, "test", instructions={"sts": "Compare."})
    assert known == task("retrieval")


@pytest.mark.parametrize(
    ("text", "code", "name"),
    [
        ('retreival = "x"', "unknown_task", "retreival"),
        ("sts = 3", "bad_instruction", "sts"),
        ("sts", "not_toml", None),
    ],
)
def test_a_wrong_file_of_instructions(
    tmp_path: Path, text: str, code: str, name: str | None
) -> None:
    path = tmp_path / "instructions.toml"
    path.write_text(text, encoding="utf-8")
    with raises(CareError, code=code, path=path, task=name):
        read_instructions(path)


def test_tasks_are_found_by_name(tmp_path: Path) -> None:
    data = str(write_data(tmp_path / "data"))
    assert list(find_tasks(data, "test")) == list(TASKS[:5])
    assert [known.name for known in find_tasks(data, "test", None, ["sts", "rerank"])] == [
        "sts",
        "rerank",
    ]
    with raises(CareError, code="missing_task", task="medical-retrieval"):
        find_tasks(data, "test", None, ["medical-retrieval"])
    with raises(CareError, code="unknown_task", task="translation"):
        find_tasks(data, "test", None, ["translation"])
