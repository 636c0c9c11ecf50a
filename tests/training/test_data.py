import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.errors import CareError
from models.training.batches import Corpus, PairCollator, Plan
from models.training.data import (
    Example,
    Text,
    first_sentence,
    in_part,
    read_dev,
    read_examples,
    read_texts,
)
from models.training.encoder import Tokens
from models.training.mining import mine
from models.training.recipe import DataEntry, Dev, Mine, Part
from tests.conftest import write_jsonl

NONE: frozenset[str] = frozenset()


def examples(held_out: frozenset[str] = NONE, **entry: Any) -> list[Example]:
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
    queries = [{"_id": f"q{i}", "text": f"问{i}"} for i in range(4)]
    write_jsonl(folder / "train.queries.jsonl", queries)
    rows = ["q0\td0\t2", "q0\td1\t0", "q1\td1\t1", "q1\td2\t1", "q2\td5\t1"]
    lines = "\n".join(["query-id\tcorpus-id\tscore", *rows])
    (folder / "train.qrels.tsv").write_text(lines + "\n", encoding="utf-8")
    return folder


def test_a_beir_folder_gives_examples(beir: Path) -> None:
    assert examples(beir=str(beir)) == [
        Example("问0", ("标题\n文0。第二句。",), ("文1。第二句。",)),
        Example("问1", ("文1。第二句。", "文2。第二句。")),
        Example("问2", ("文5。第二句。",)),
    ]
    # Documents of another source are no positives, and their queries no examples.
    found = examples(beir=str(beir), where={"source": "a"})
    assert [example.query for example in found] == ["问0", "问1"]


def test_held_out_queries_are_left_out_and_counted(beir: Path) -> None:
    entry = DataEntry(beir=str(beir))
    found, dropped = read_examples([entry], frozenset({"问1"}), {})
    assert ([example.query for example in found], dropped) == (["问0", "问2"], 1)
    found_texts, dropped = read_texts([entry], frozenset({"问1"}), {})
    assert (Text("query", "问1") in found_texts, dropped) == (False, 1)


def test_texts_of_a_beir_folder(beir: Path) -> None:
    found = texts(beir=str(beir), cut="sentence")
    # A query that nobody judged is none.
    assert found[:3] == [Text("query", f"问{i}") for i in range(3)]
    assert found[3] == Text("document", "标题\n文0。")
    assert texts(beir=str(beir), roles=["query"], limit=2) == found[:2]


def test_texts_of_another_source_are_not_read(beir: Path) -> None:
    found = texts(beir=str(beir), where={"source": "a"})
    assert {text.text for text in found if text.role == "query"} == {"问0", "问1"}
    assert len([text for text in found if text.role == "document"]) == 4


def test_a_paraphrase_of_a_held_out_query_is_left_out(tmp_path: Path) -> None:
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
    assert examples(pairs=path, fields=["a", "b"])[0] == Example("一", ("二",))


def test_examples_of_equal_queries_are_one(tmp_path: Path) -> None:
    """A document that answers the query in one line is no negative in another."""
    records = [
        {"query": "问", "positives": ["甲"], "negatives": ["乙", "丙"]},
        {"query": "问", "positives": ["乙"]},
    ]
    path = write_jsonl(tmp_path / "x.jsonl", records)
    assert examples(triples=str(path)) == [Example("问", ("甲", "乙"), ("丙",))]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"query": "", "positives": ["甲"]}, "line 2: query is missing, empty"),
        ({"query": " \u200b", "positives": ["甲"]}, "line 2: query is missing, empty"),
        ({"positives": ["甲"]}, "line 2: query is missing"),
        ({"query": "问"}, "line 2: positives is empty"),
        ({"query": "问", "positives": []}, "line 2: positives is empty"),
        ({"query": "问", "positives": [" "]}, "line 2: positives is missing, empty"),
        ({"query": "问", "positives": "甲"}, "line 2: positives is not a list"),
        ({"query": "问", "positives": [1]}, "line 2: positives is missing, empty or no text"),
        ({"query": "问", "positives": ["甲"], "negatives": [""]}, "line 2: negatives is"),
        (
            {"query": "问", "positives": ["甲", "乙"], "negatives": ["乙 "]},
            "line 2: a positive is also a negative",
        ),
        (["问"], "line 2 is no JSON object"),
    ],
)
def test_a_bad_triple_is_named_by_its_line(tmp_path: Path, record: Any, message: str) -> None:
    path = tmp_path / "triples.jsonl"
    good = {"query": "好", "positives": ["甲"]}
    path.write_text(f"{json.dumps(good)}\n{json.dumps(record)}\n")
    with pytest.raises(CareError, match=f"triples.jsonl {message}"):
        examples(triples=str(path))


def test_other_bad_files_are_named(tmp_path: Path, beir: Path) -> None:
    with pytest.raises(CareError, match=r"none\.jsonl cannot be read: No such file"):
        examples(triples=str(tmp_path / "none.jsonl"))
    (tmp_path / "cut.jsonl").write_text('{"query": "')
    with pytest.raises(CareError, match=r"cut\.jsonl line 1 is not valid JSON"):
        examples(triples=str(tmp_path / "cut.jsonl"))
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(CareError, match=r"bytes\.jsonl is not UTF-8"):
        examples(triples=str(tmp_path / "bytes.jsonl"))
    with pytest.raises(CareError, match=r"no document has \{'source': 'c'\}"):
        examples(beir=str(beir), where={"source": "c"})
    with (beir / "train.qrels.tsv").open("a") as file:
        file.write("q3\td9\t1\n")
    with pytest.raises(CareError, match=r"train\.qrels\.tsv: document 'd9' is not in the corpus"):
        examples(beir=str(beir))


@pytest.mark.parametrize(
    ("file", "line", "message"),
    [
        ("corpus", {"_id": "x", "text": 5}, "corpus.jsonl line 7: title or text is no text"),
        ("corpus", {"_id": "x", "text": {"text": "a"}}, "corpus.jsonl line 7: title or text"),
        ("corpus", {"_id": "x", "title": 5, "text": "a"}, "corpus.jsonl line 7: title or text"),
        ("corpus", {"_id": "x", "text": " "}, "corpus.jsonl line 7: title or text is no text, or"),
        ("corpus", {"_id": "x", "text": "a", "metadata": "b"}, "line 7: metadata is no object"),
        ("train.queries", {"_id": "x", "text": 5}, "train.queries.jsonl line 5 is not JSON with"),
        ("train.queries", {"_id": "x", "text": ""}, "train.queries.jsonl: 'x' is missing, empty"),
    ],
)
def test_a_bad_line_of_a_beir_folder_is_named(
    beir: Path, file: str, line: Any, message: str
) -> None:
    with (beir / f"{file}.jsonl").open("a") as lines:
        lines.write(json.dumps(line) + "\n")
    with pytest.raises(CareError, match=message):
        examples(beir=str(beir))
    with pytest.raises(CareError, match=message):
        read_dev(Dev(beir=str(beir), split="train"))


def test_nothing_left_is_an_error(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [{"query": "问", "positives": ["甲"]}])
    with pytest.raises(CareError, match=r"no example is left of .*x\.jsonl"):
        examples(frozenset({"问"}), triples=str(path))


def test_parts_cover_all_queries_once() -> None:
    queries = [f"问题{i}" for i in range(400)]
    parts = [{q for q in queries if in_part(q, Part(folds=5, only=k))} for k in range(5)]
    assert sum(map(len, parts)) == len(set().union(*parts)) == 400
    assert min(map(len, parts)) > 50
    without = {q for q in queries if in_part(q, Part(folds=5, without=3))}
    assert without == set(queries) - parts[3]


def test_dev_is_cut_but_keeps_what_was_judged(beir: Path) -> None:
    dev = read_dev(Dev(beir=str(beir), split="train", queries=2, documents=1))
    assert len(dev.queries) == len(dev.qrels) == 2
    judged = {id_ for found in dev.qrels.values() for id_ in found}
    assert judged < set(dev.documents)
    assert len(dev.documents) == len(judged) + 1


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("一。二。", "一。"), ("一？", "一？"), ("一", "一"), ("一\n二！三", "一\n二！")],
)
def test_first_sentence(text: str, sentence: str) -> None:
    assert first_sentence(text) == sentence


def tokens_of(count: int) -> Tokens:
    return Tokens(np.arange(count, dtype=np.int32), np.arange(count + 1))


def test_a_batch_holds_each_document_once_and_knows_all_positives() -> None:
    found = [
        Example("a", ("x", "y"), ("z",)),
        Example("b", ("y",), ("x",)),
        Example("c", ("z",)),
    ]
    corpus = Corpus.of(found)
    texts_of = {
        "query": tokens_of(len(corpus.queries)),
        "document": tokens_of(len(corpus.documents)),
    }
    collate = PairCollator(corpus, texts_of, 1, seed=0)
    batch = collate([(0, 0), (0, 2), (0, 3)])
    names = [corpus.documents[row] for row in batch["documents"]]
    assert sorted(names) == ["x", "y", "z"]
    assert [names[column] for column in batch["targets"]] == ["x", "y", "z"]
    known = [{corpus.documents[r] for r in row if r >= 0} for row in batch["positives"].tolist()]
    assert known == [{"x", "y"}, {"y"}, {"z"}]


def test_every_document_may_be_in_each_batch() -> None:
    corpus = Corpus.of([Example("a", ("x",)), Example("b", ("y",)), Example("c", ("z",))])
    vectors = np.eye(3, dtype=np.float32)
    texts_of = {"query": tokens_of(3), "document": vectors}
    batch = PairCollator(corpus, texts_of, 0, seed=0, all_documents=True)([(0, 1), (0, 2)])
    assert sorted(batch["documents"].tolist()) == [0, 1, 2]
    assert batch["documents"][batch["targets"]].tolist() == [1, 2]
    assert batch["document_vectors"].tolist() == vectors[batch["documents"].numpy()].tolist()


def test_negatives_are_drawn_by_seed_and_epoch() -> None:
    corpus = Corpus.of([Example("a", ("x",), tuple("bcdefghijk"))])
    texts_of = {"query": tokens_of(1), "document": tokens_of(11)}

    def drawn(seed: int, epoch: int) -> list[int]:
        rows: list[int] = PairCollator(corpus, texts_of, 3, seed)([(epoch, 0)])[
            "documents"
        ].tolist()
        assert len(set(rows)) == 4
        return rows

    assert drawn(0, 0) == drawn(0, 0)
    assert len({tuple(drawn(seed, epoch)) for seed in range(3) for epoch in range(3)}) > 5


def test_a_plan_is_a_function_of_its_seed_and_shows_each_example_once_an_epoch() -> None:
    lengths = np.random.default_rng(0).integers(1, 100, 103)
    plan = Plan(103, 3, 10, 0, lengths)
    batches = list(plan)
    assert batches == list(Plan(103, 3, 10, 0, lengths))
    assert batches != list(Plan(103, 3, 10, 1, lengths))
    assert len(batches) == len(plan) == 30
    for epoch in range(3):
        rows = [row for batch in batches for e, row in batch if e == epoch]
        assert len(rows) == len(set(rows)) == 100
    spread = [np.ptp(lengths[[row for _, row in batch]]) for batch in batches]
    mixed = [np.ptp(lengths[[row for _, row in batch]]) for batch in Plan(103, 3, 10, 0)]
    assert np.mean(spread) < np.mean(mixed) / 4


def test_few_examples_are_one_batch() -> None:
    assert [len(batch) for batch in Plan(3, 2, 10, 0)] == [3, 3]


def unit_rows(*angles: float) -> Any:
    radians = np.deg2rad(angles)
    return np.stack([np.cos(radians), np.sin(radians)], axis=1).astype(np.float32)


def test_mining_keeps_to_ranks_and_margin() -> None:
    queries, documents = unit_rows(0), unit_rows(40, 10, 20, 30, 50, 60)
    # Ranks without the positive (document 0, at 40 degrees): 10, 20, 30, 50, 60.
    stage = Mine(kind="mine", data=[DataEntry(texts="x")], first=2, last=4, negatives=9, margin=9)
    assert mine(queries, documents, [[0]], stage) == [[2, 3, 4]]
    assert mine(queries, documents, [[0]], stage.model_copy(update={"negatives": 1})) == [[2]]
    # Below 95 % of the positive's cosine there are 50 and 60 degrees.
    strict = stage.model_copy(update={"margin": 0.95, "first": 1, "last": 10})
    assert mine(queries, documents, [[0]], strict) == [[4, 5]]


def test_a_margin_lies_below_a_negative_score_too() -> None:
    queries, documents = unit_rows(0), unit_rows(120, 121, 150)
    stage = Mine(kind="mine", data=[DataEntry(texts="x")], first=1, last=9, margin=0.8)
    assert mine(queries, documents, [[0]], stage) == [[2]]
