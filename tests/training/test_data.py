import json
from pathlib import Path
from typing import Any

import pytest

from core.errors import DataError
from core.records import Triple
from evaluation.beir import write_split
from tests.conftest import write_jsonl
from tests.errors import raises
from training.corpus import Text
from training.data import in_part, read_dev, read_examples, read_texts, stream_documents
from training.errors import TrainingError
from training.schema import DataEntry, Dev, Part

NONE: frozenset[str] = frozenset()


def examples(held_out: frozenset[str] = NONE, **entry: Any) -> list[Triple]:
    return read_examples([DataEntry.model_validate(entry)], held_out, {})[0]


def texts(held_out: frozenset[str] = NONE, **entry: Any) -> list[Text]:
    return read_texts([DataEntry.model_validate(entry)], held_out, {})[0]


@pytest.fixture
def beir(tmp_path: Path) -> Path:
    folder = tmp_path / "beir"
    folder.mkdir()
    documents = [
        {
            "_id": f"d{i}",
            "title": "标题" if i == 0 else "",
            "text": f"文{i}。第二句。",
            "metadata": {"source": "a" if i < 4 else "b"},
        }
        for i in range(6)
    ]
    write_jsonl(folder / "corpus.jsonl", documents)
    queries = {f"q{i}": f"问{i}" for i in range(4)}
    qrels = {"q0": {"d0": 2, "d1": 0}, "q1": {"d1": 1, "d2": 1}, "q2": {"d5": 1}}
    write_split(folder, "train", queries, qrels)
    return folder


def test_a_beir_folder_is_read_as_examples(beir: Path) -> None:
    assert examples(beir=str(beir)) == [
        Triple("问0", ("标题\n文0。第二句。",), ("文1。第二句。",)),
        Triple("问1", ("文1。第二句。", "文2。第二句。")),
        Triple("问2", ("文5。第二句。",)),
    ]
    # Documents of another source are not positives, and their queries are skipped.
    found = examples(beir=str(beir), where={"source": "a"})
    assert [example.query for example in found] == ["问0", "问1"]


def test_held_out_queries_are_dropped_and_counted(beir: Path) -> None:
    entry = DataEntry(beir=str(beir))
    found, dropped = read_examples([entry], frozenset({"问1"}), {})
    assert ([example.query for example in found], dropped) == (["问0", "问2"], 1)
    found_texts, dropped = read_texts([entry], frozenset({"问1"}), {})
    assert (Text("query", "问1") in found_texts, dropped) == (False, 1)


def test_texts_of_a_beir_folder(beir: Path) -> None:
    found = texts(beir=str(beir), cut="sentence")
    # Queries without judgements are skipped.
    assert found[:3] == [Text("query", f"问{i}") for i in range(3)]
    assert found[3] == Text("document", "标题\n文0。")
    assert texts(beir=str(beir), roles=["query"], limit=2) == found[:2]


def test_all_documents_of_a_beir_folder_can_be_mined(beir: Path, tmp_path: Path) -> None:
    pairs = write_jsonl(tmp_path / "x.jsonl", [{"title": "问", "text": "另一篇"}])
    entries = [DataEntry(beir=str(beir), where={"source": "b"}), DataEntry(pairs=str(pairs))]
    assert list(stream_documents(entries, {})) == ["文4。第二句。", "文5。第二句。", "另一篇"]


def test_part_selects_queries_and_their_documents(beir: Path, tmp_path: Path) -> None:
    """With a part of the queries, only their positives and negatives are read as documents."""
    part = Part(folds=2, only=1)
    path = write_jsonl(tmp_path / "x.jsonl", [{"text": f"文{i}"} for i in range(9)])
    taken = [f"文{i}" for i in range(9) if in_part(f"文{i}", part)]
    assert 0 < len(taken) < 9
    assert [t.text for t in texts(texts=str(path), part=part)] == taken
    found = texts(beir=str(beir), part=part)
    taken = [f"问{i}" for i in range(3) if in_part(f"问{i}", part)]
    assert 0 < len(taken) < 3
    assert [t.text for t in found if t.role == "query"] == taken
    answers = [e for e in examples(beir=str(beir)) if in_part(e.query, part)]
    documents = {text for e in answers for text in (*e.positives, *e.negatives)}
    assert {t.text for t in found if t.role == "document"} == documents


def test_texts_of_another_source_are_not_read(beir: Path) -> None:
    found = texts(beir=str(beir), where={"source": "a"})
    assert {text.text for text in found if text.role == "query"} == {"问0", "问1"}
    assert len([text for text in found if text.role == "document"]) == 4


def test_a_paraphrase_of_a_held_out_query_is_dropped(tmp_path: Path) -> None:
    records = [{"a": "一", "b": "一样"}, {"a": "二", "b": "也是"}]
    path = str(write_jsonl(tmp_path / "x.jsonl", records))
    held_out = frozenset({"一"})
    assert [t.text for t in texts(held_out, texts=path, fields=["a", "b"])] == ["二", "也是"]
    assert [t.text for t in texts(held_out, pairs=path, fields=["a", "b"])] == ["二", "也是"]


def test_texts_and_pairs_by_fields(tmp_path: Path) -> None:
    records = [{"a": "一", "b": " 二 "}, {"a": "三", "b": "二"}]
    path = str(write_jsonl(tmp_path / "x.jsonl", records))
    assert [t.text for t in texts(texts=path, fields=["a", "b"])] == ["一", "二", "三"]
    assert texts(texts=path, fields=["b"], role="document") == [Text("document", "二")]
    assert examples(pairs=path, fields=["a", "b"])[0] == Triple("一", ("二",))


def test_words_of_a_list_are_examples_of_their_terms(tmp_path: Path) -> None:
    path = tmp_path / "terms.tsv"
    path.write_text(
        "心梗\t心肌梗死\n三高\t高血压,高血脂,高血糖\n心梗塞\t心梗塞\n", encoding="utf-8"
    )
    found = [Triple("心梗", ("心肌梗死",)), Triple("三高", ("高血压 高血脂",))]
    assert examples(terms=str(path)) == found
    assert Triple("心梗", ("心肌梗死",)) in examples(terms="everyday")
    with raises(DataError, code="unreadable"):
        examples(terms="everyda")


def test_examples_of_equal_queries_are_merged(tmp_path: Path) -> None:
    """A positive of a query in one line is not its negative in another."""
    records = [
        {"query": "问", "positives": ["甲"], "negatives": ["乙", "丙"]},
        {"query": "问", "positives": ["乙"]},
    ]
    path = write_jsonl(tmp_path / "x.jsonl", records)
    assert examples(triples=str(path)) == [Triple("问", ("甲", "乙"), ("丙",))]


GOOD = {"query": "好", "positives": ["甲"]}


@pytest.mark.parametrize(
    ("record", "code", "field"),
    [
        ({"query": "", "positives": ["甲"]}, "bad_field", "query"),
        ({"query": " \u200b", "positives": ["甲"]}, "bad_field", "query"),
        ({"positives": ["甲"]}, "bad_field", "query"),
        ({"query": "问"}, "bad_field", "positives"),
        ({"query": "问", "positives": []}, "bad_field", "positives"),
        ({"query": "问", "positives": [" "]}, "bad_field", "positives"),
        ({"query": "问", "positives": "甲"}, "bad_field", "positives"),
        ({"query": "问", "positives": [1]}, "bad_field", "positives"),
        ({"query": "问", "positives": ["甲"], "negatives": [""]}, "bad_field", "negatives"),
        ({"query": "问", "positives": ["甲", "乙"], "negatives": ["乙 "]}, "contradiction", None),
        (["问"], "not_json", None),
    ],
)
def test_an_invalid_triple_is_an_error_with_its_line(
    tmp_path: Path, record: Any, code: str, field: str | None
) -> None:
    path = tmp_path / "triples.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n{json.dumps(record)}\n")
    with raises(DataError, code, path=path, line=2, field=field):
        examples(triples=str(path))


def test_other_invalid_files_are_errors_with_their_path(tmp_path: Path, beir: Path) -> None:
    path = tmp_path / "x.jsonl"
    with raises(DataError, "unreadable", path=path):
        examples(triples=str(path))
    path.write_text('{"query": "')
    with raises(DataError, "not_json", path=path, line=1):
        examples(triples=str(path))
    path.write_bytes(b"\xff\xfe")
    with raises(DataError, "not_utf8", path=path):
        examples(triples=str(path))
    with raises(TrainingError, "not_examples"):
        examples(texts=str(path))
    with raises(TrainingError, "no_documents", path=beir / "corpus.jsonl"):
        examples(beir=str(beir), where={"source": "c"})
    qrels = beir / "train.qrels.tsv"
    with qrels.open("a") as file:
        file.write("q3\td9\t1\n")
    with raises(DataError, "unknown_document", path=qrels, id="d9"):
        examples(beir=str(beir))


@pytest.mark.parametrize(
    ("file", "record", "code", "named"),
    [
        ("corpus", {"_id": "x", "text": " "}, "empty", {"id": "x"}),
        ("train.queries", {"_id": "x", "text": 5}, "bad_field", {"line": 5, "field": "text"}),
        ("train.queries", {"_id": "x", "text": ""}, "empty", {"id": "x"}),
    ],
)
def test_an_invalid_line_of_a_beir_folder_is_an_error_with_its_path(
    beir: Path, file: str, record: Any, code: str, named: dict[str, Any]
) -> None:
    path = beir / f"{file}.jsonl"
    with path.open("a") as lines:
        lines.write(json.dumps(record) + "\n")
    with raises(DataError, code, path=path, **named):
        examples(beir=str(beir))
    with raises(DataError, code, path=path, **named):
        read_dev(Dev(beir=str(beir), split="train"))


def test_no_remaining_data_is_an_error(tmp_path: Path, beir: Path) -> None:
    path = str(write_jsonl(tmp_path / "x.jsonl", [{"query": "问", "positives": ["甲"]}]))
    with raises(TrainingError, "no_examples"):
        examples(frozenset({"问"}), triples=path)
    with raises(TrainingError, "no_texts"):
        texts(frozenset({"问"}), triples=path)
    with raises(TrainingError, "no_queries"):
        read_dev(Dev(beir=str(beir), split="train", where={"source": "b"}, part=OTHERS))


# Only q2 has documents of source b; this selects the fold without q2.
OTHERS = Part(folds=2, only=0 if in_part("问2", Part(folds=2, only=1)) else 1)


def test_parts_are_disjoint_and_cover_all_queries() -> None:
    queries = [f"问题{i}" for i in range(400)]
    parts = [{q for q in queries if in_part(q, Part(folds=5, only=k))} for k in range(5)]
    assert sum(map(len, parts)) == len(set().union(*parts)) == 400
    assert min(map(len, parts)) > 50
    without = {q for q in queries if in_part(q, Part(folds=5, without=3))}
    assert without == set(queries) - parts[3]


def test_a_reduced_dev_set_keeps_judged_documents(beir: Path) -> None:
    dev = read_dev(Dev(beir=str(beir), split="train", queries=2, documents=1))
    assert len(dev.queries) == len(dev.qrels) == 2
    judged = {id_ for found in dev.qrels.values() for id_ in found}
    assert judged < set(dev.documents)
    assert len(dev.documents) == len(judged) + 1
