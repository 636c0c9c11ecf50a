import json
from pathlib import Path
from typing import Any

import pytest

from core.errors import CareError
from models.evaluation.cmedteb.data import read_reranking, read_retrieval, read_sts
from models.evaluation.cmedteb.tasks import RankingTask, find_tasks, task


def write_lines(path: Path, records: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
    path.write_text("".join(lines), "utf-8")
    return path


def write_beir(folder: Path, qrels: str = "q1\td1\t1\n") -> Path:
    write_lines(
        folder / "corpus.jsonl",
        [{"_id": "d1", "title": "骨折", "text": "固定\u2028患肢"}, {"_id": "d2", "text": "少盐"}],
    )
    write_lines(
        folder / "test.queries.jsonl",
        [{"_id": "q1", "text": " 骨折 怎么办 "}, {"_id": "q2", "text": "未判"}],
    )
    (folder / "test.qrels.tsv").write_text("query-id\tcorpus-id\tscore\n" + qrels, "utf-8")
    return folder


def test_a_beir_folder_is_read_under_the_text_rules(tmp_path: Path) -> None:
    data = read_retrieval(write_beir(tmp_path), "test")
    assert data.corpus == {"d1": "骨折\n固定 患肢", "d2": "少盐"}
    assert data.queries == {"q1": "骨折 怎么办"}
    assert data.qrels == {"q1": {"d1": 1}}
    assert data.candidates is None


def test_the_layout_of_beir_itself_is_read_too(tmp_path: Path) -> None:
    write_beir(tmp_path)
    (tmp_path / "test.queries.jsonl").rename(tmp_path / "queries.jsonl")
    (tmp_path / "qrels").mkdir()
    (tmp_path / "test.qrels.tsv").rename(tmp_path / "qrels" / "test.tsv")
    assert read_retrieval(tmp_path, "test").qrels == {"q1": {"d1": 1}}


@pytest.mark.parametrize(
    ("qrels", "message"),
    [("q9\td1\t1\n", "judges query 'q9'"), ("q1\td9\t1\n", "judges document 'd9'")],
)
def test_judgements_of_what_is_not_there_are_refused(
    tmp_path: Path, qrels: str, message: str
) -> None:
    with pytest.raises(CareError, match=message):
        read_retrieval(write_beir(tmp_path, qrels), "test")


def test_data_that_judge_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CareError, match=r"test.qrels.tsv judges no query"):
        read_retrieval(write_beir(tmp_path, ""), "test")
    with pytest.raises(CareError, match=r"rerank.jsonl holds no query"):
        read_reranking(write_lines(tmp_path / "rerank.jsonl", []))


@pytest.mark.parametrize(
    ("name", "record", "message"),
    [
        ("corpus.jsonl", {"_id": ["d"], "text": "a"}, "line 1: _id is missing or no string"),
        ("corpus.jsonl", {"_id": "d", "text": 3}, "line 1: text is missing or no string"),
        ("corpus.jsonl", {"_id": "d", "text": "a", "metadata": "x"}, "line 1: metadata is no obj"),
        ("test.queries.jsonl", {"_id": "q1", "text": None}, "line 1 is not JSON with _id and text"),
        ("test.queries.jsonl", {"_id": [], "text": "a"}, "line 1 is not JSON with _id and text"),
    ],
)
def test_a_wrong_line_of_beir_is_named(
    tmp_path: Path, name: str, record: dict[str, Any], message: str
) -> None:
    write_beir(tmp_path)
    write_lines(tmp_path / name, [record])
    with pytest.raises(CareError, match=f"{name} {message}"):
        read_retrieval(tmp_path, "test")


def test_a_reranking_query_orders_its_own_candidates(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "rerank.jsonl",
        [
            {"query": "头痛", "positives": ["休息"], "negatives": ["骨折固定", "少盐"]},
            {"_id": "x", "query": "高血压", "positives": ["少盐"], "negatives": ["休息"]},
        ],
    )
    data = read_reranking(path)
    assert len(data.corpus) == 3
    assert [data.corpus[id_] for id_ in (data.candidates or {})["q1"]] == [
        "休息",
        "骨折固定",
        "少盐",
    ]
    assert list(data.qrels["x"].values()) == [1, 0]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"query": "a", "positives": ["b"]}, "line 1: negatives is missing or no list of strings"),
        ({"query": "a", "positives": "b", "negatives": []}, "line 1: positives is .* no list"),
        ({"query": "a", "positives": [3], "negatives": []}, "line 1: positives is .* no list"),
        ({"query": 3, "positives": ["b"], "negatives": []}, "line 1: query is missing or no str"),
        ({"query": "a", "positives": [], "negatives": ["b"]}, "line 1: positives is empty"),
        ({"query": "a", "positives": ["b"], "negatives": ["b "]}, "a positive is also a negative"),
        ([], "line 1 is no JSON object"),
    ],
)
def test_a_wrong_line_of_reranking_is_named(tmp_path: Path, record: Any, message: str) -> None:
    with pytest.raises(CareError, match=message):
        read_reranking(write_lines(tmp_path / "rerank.jsonl", [record]))


def test_sts_needs_labels_that_differ(tmp_path: Path) -> None:
    pairs = [{"text1": "a", "text2": "b", "label": 1}, {"text1": "a", "text2": "c", "label": 1}]
    with pytest.raises(CareError, match="labels do not differ"):
        read_sts(write_lines(tmp_path / "sts.jsonl", pairs))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text1": None}, "line 1: text1 is missing or no string"),
        ({"label": None}, "line 1: label is missing or no number"),
        ({"label": float("nan")}, "line 1: label is missing or no number"),
    ],
)
def test_a_wrong_line_of_sts_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    record = {"text1": "a", "text2": "b", "label": 1} | change
    with pytest.raises(CareError, match=message):
        read_sts(write_lines(tmp_path / "sts.jsonl", [record]))


def test_a_folder_holds_the_tasks_whose_files_are_there(tmp_path: Path) -> None:
    write_beir(tmp_path / "retrieval")
    write_lines(tmp_path / "rerank" / "test.jsonl", [])
    write_lines(tmp_path / "sts.jsonl", [])
    names = [known.name for known in find_tasks(str(tmp_path), "test")]
    assert names == ["retrieval", "rerank", "sts"]
    assert [t.name for t in find_tasks(str(tmp_path / "retrieval"), "test")] == ["retrieval"]


def test_a_beir_folder_may_hold_other_tasks_too(tmp_path: Path) -> None:
    write_lines(write_beir(tmp_path) / "sts.jsonl", [])
    found = find_tasks(str(tmp_path), "test")
    assert {known.name for known in found} == {"retrieval", "sts"}
    retrieval = found[task("retrieval")]
    assert isinstance(retrieval, RankingTask) and retrieval.ranking.qrels == {"q1": {"d1": 1}}


def test_an_empty_folder_is_told_what_it_may_hold(tmp_path: Path) -> None:
    with pytest.raises(CareError, match=r"holds no task: it may hold .*rerank\.jsonl"):
        find_tasks(str(tmp_path), "test")


def test_the_hub_has_the_tasks_with_data_sets_of_their_own() -> None:
    names = [known.name for known in find_tasks("hub", "test")]
    assert names == ["cmedqa-v1", "cmedqa-v2", "cmedqa-retrieval", "medical-retrieval"]
    assert len(find_tasks("hub", "test", "someone/CMedTEB")) == 7
