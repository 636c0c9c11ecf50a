"""The steps of data/sample/raw/README.md over its texts."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from core.records import read_jsonl
from curation.cleaning import clean_documents, clean_queries, clean_texts, cleaners
from curation.commands import run_command
from curation.config import Cleaning
from curation.diversity import DiversityOptions, Kind, diversify_file
from evaluation.beir import read_documents, read_qrels, read_queries
from tests.curation.endpoints import scripted_server
from tests.curation.raw_sample import ENDPOINTS, RAW, language_model, read_raw
from training.data import read_dev, read_examples
from training.schema import DataEntry, Dev


def test_each_question_has_an_answer_of_its_id() -> None:
    queries, answers = read_raw()
    assert queries.keys() == answers.keys()
    assert 120 <= len(queries) <= 300


def test_every_department_of_the_sample_is_there() -> None:
    found, expected = (
        Counter(document.metadata["department"] for document in read_documents(path))
        for path in (RAW / "corpus.jsonl", RAW.parent / "corpus.jsonl")
    )
    assert found.keys() == expected.keys()


def test_the_flaws_are_cleaned() -> None:
    queries, answers = read_raw()
    of_queries, of_documents = cleaners(Cleaning())
    kept = clean_queries(queries, of_queries)
    assert of_queries.counts == Counter(
        kept=167, too_short=4, duplicate=3, anonymized=3, too_long=0
    )
    documents = list(clean_documents(read_documents(RAW / "corpus.jsonl"), of_documents))
    assert of_documents.counts == Counter(
        kept=167, too_short=5, duplicate=2, anonymized=10, too_long=0
    )
    before = " ".join([*queries.values(), *answers.values()])
    after = " ".join([*kept.values(), *(document.text for document in documents)])
    for flaw in ("<p>", "&lt;b&gt;", "&nbsp;", "http", "0000", "０", "example", "我叫王小明"):
        assert flaw in before and flaw not in after
    for token in ("<tel>", "<url>", "<email>", "<qq>", "<wechat>", "<name>", "<id>"):
        assert token in after
    # Cleaning does not convert traditional characters.
    assert "血壓" in after


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data folder after `clean` and `diversify`."""
    data = tmp_path_factory.mktemp("care")
    clean_texts(RAW / "queries.jsonl", RAW / "corpus.jsonl", data, benchmark=70)
    files: list[tuple[Kind, str]] = [("queries", "queries.jsonl"), ("documents", "corpus.jsonl")]
    for kind, name in files:
        diversify_file(data / "cleaned" / name, data / name, kind, DiversityOptions())
    return data


def run(command: str, data: Path) -> dict[str, Any]:
    """Runs a command with its YAML file on a scripted server; returns its statistics."""
    path = RAW / f"{command.removeprefix('build-')}.yaml"
    with scripted_server(language_model()) as url:
        changes = [f"{name}.base_url={url}" for name in ENDPOINTS.get(command, ())]
        found = run_command(command, path, data=data, changes=changes)
    if command == "mix":
        return found
    statistics = Path(str(found["output"])) / "statistics.json"
    return dict(json.loads(statistics.read_text("utf-8")))


@pytest.mark.e2e
def test_near_duplicates_are_dropped(commands: Path) -> None:
    for name, group in (("queries", "鱼刺"), ("corpus", "喝醋化不掉鱼刺")):
        raw, kept = (
            [record["text"] for _, record in read_jsonl(folder / f"{name}.jsonl")]
            for folder in (commands / "cleaned", commands)
        )
        assert 0.9 * len(raw) < len(kept) < len(raw)
        # One near text is allowed.
        assert sum(group in text for text in kept) <= 2


@pytest.mark.e2e
def test_the_data_of_a_recipe_are_made(commands: Path) -> None:
    statistics = run("build-benchmark", commands)
    folder = commands / "benchmark" / "retrieval"
    assert statistics["splits"]["test"]["retrieval"]["queries"] >= 25
    assert statistics["verdicts"]["disputed"] == 0
    ids = {document.id for document in read_documents(folder / "corpus.jsonl")}
    judged = {
        split: read_qrels(folder / "qrels" / f"{split}.tsv") for split in statistics["splits"]
    }
    for qrels in judged.values():
        assert all(grades.keys() <= ids for grades in qrels.values())
        # Most questions are answered by the document of their own id.
        assert sum(query in grades for query, grades in qrels.items()) >= 0.9 * len(qrels)

    statistics = run("annotate", commands)
    triples = [record for _, record in read_jsonl(commands / "annotated" / "triples.jsonl")]
    assert len(triples) == statistics["triples"] >= 70
    texts = [text for triple in triples for text in triple["positives"] + triple["negatives"]]
    assert not any("<p>" in text or "0000" in text for text in texts)
    assert any("<tel>" in text for text in texts)
    assert max(len(triple["negatives"]) for triple in triples) == 8

    assert run("sts", commands)["train"]["pairs"] >= 15
    report = run("mix", commands)
    entry = DataEntry(triples=str(commands / "fine-tuning.jsonl"))
    dev = read_dev(Dev(beir=str(commands / "dev")))
    examples, dropped = read_examples([entry], frozenset(dev.queries.values()), {})
    assert (len(examples), dropped) == (report["triples"], 0)
    assert len(dev.queries) == report["dev"] >= 15
    queries = read_queries(folder / "queries.jsonl")
    test = {queries[id_] for id_ in judged["test"]}
    assert test.isdisjoint(example.query for example in examples)
    pairs = DataEntry(pairs=str(commands / "pairs.jsonl"))
    assert test.isdisjoint(e.query for e in read_examples([pairs], frozenset(), {})[0])
    for name in ("queries", "corpus"):
        texts = [record["text"] for _, record in read_jsonl(commands / f"{name}.jsonl")]
        assert name == "corpus" or test.isdisjoint(texts)
