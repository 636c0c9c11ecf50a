"""The steps of data/sample/raw/README.md over its texts."""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from core.records import read_jsonl
from curation.cleaning import clean, clean_documents, clean_queries
from curation.commands import run_command
from curation.diversity import DiversityOptions, Kind, diversify_file, diversity_rule
from evaluation.beir import read_documents, read_qrels, read_queries
from tests.curation.endpoints import grader, scripted_server

RAW = Path(__file__).parents[2] / "data" / "sample" / "raw"


def read_raw() -> tuple[dict[str, str], dict[str, str]]:
    documents = {d.id: d.text for d in read_documents(RAW / "corpus.jsonl")}
    return read_queries(RAW / "queries.jsonl"), documents


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
    kept, counts = clean_queries(queries, (4, 500), anonymous=True)
    assert counts == Counter(kept=167, too_short=4, duplicate=3, anonymized=3, too_long=0)
    documents, counts = clean_documents(
        read_documents(RAW / "corpus.jsonl"), (10, 5000), anonymous=True
    )
    assert counts == Counter(kept=167, too_short=5, duplicate=2, anonymized=10, too_long=0)
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
    """The folder of a copy of the repository's layout after `diversify` of both files."""
    root = tmp_path_factory.mktemp("repository")
    shutil.copytree(RAW, root / "data" / "sample" / "raw")
    files: list[tuple[Kind, str]] = [("queries", "queries.jsonl"), ("documents", "corpus.jsonl")]
    for kind, name in files:
        rule = diversity_rule(kind, t=0.93, near=0)
        output = root / "builds" / "sample-raw" / name
        diversify_file(RAW / name, output, kind, rule, DiversityOptions(seeds=10))
    # Both commands read the same corpus: it is encoded once.
    vectors, link = (
        root / "builds" / "sample-raw" / name / "cache" / "vectors"
        for name in ("benchmark", "triples")
    )
    vectors.mkdir(parents=True)
    link.parent.mkdir(parents=True)
    link.symlink_to(vectors)
    return root


def make_judge() -> Callable[[str, str, str], str]:
    """Returns a judge that grades the answers of a question S, everything else C."""
    queries, answers = read_raw()
    own: dict[str, set[str]] = {}
    for id_, query in queries.items():
        answer = clean(answers[id_], anonymous=True)
        own.setdefault(clean(query, anonymous=True), set()).add(answer)
    return lambda _, query, passage: "S" if passage in own[query] else "C"


def run(command: str, root: Path) -> dict[str, Any]:
    """Runs a command with its YAML file, whose judges become a scripted server."""
    path = root / "data" / "sample" / "raw" / f"{command.removeprefix('build-')}.yaml"
    facts = yaml.safe_load(path.read_text("utf-8"))
    with scripted_server(grader(make_judge())) as url:
        for judge in facts["judges"]:
            judge["base_url"] = url
        path.write_text(yaml.safe_dump(facts, allow_unicode=True), encoding="utf-8")
        output = Path(str(run_command(command, path)["output"]))
    statistics: dict[str, Any] = json.loads((output / "statistics.json").read_text("utf-8"))
    return statistics


@pytest.mark.e2e
def test_near_duplicates_are_dropped(commands: Path) -> None:
    for name, group in (("queries", "鱼刺卡"), ("corpus", "喝醋化不掉鱼刺")):
        raw, kept = (
            [record["text"] for _, record in read_jsonl(path)]
            for path in (RAW / f"{name}.jsonl", commands / "builds/sample-raw" / f"{name}.jsonl")
        )
        assert 140 <= len(kept) <= 155 < len(raw)
        assert (sum(group in text for text in raw), sum(group in text for text in kept)) == (3, 1)


@pytest.mark.e2e
def test_a_benchmark_is_made(commands: Path) -> None:
    statistics = run("build-benchmark", commands)
    folder = commands / "builds/sample-raw/benchmark/retrieval"
    assert statistics["retrieval"]["queries"] >= 25
    assert statistics["verdicts"]["disputed"] == 0
    qrels = read_qrels(folder / "qrels" / "test.tsv")
    ids = {document.id for document in read_documents(folder / "corpus.jsonl")}
    assert all(grades.keys() <= ids for grades in qrels.values())
    # Most questions are answered by the document of their own id; of duplicates another is kept.
    assert sum(query in grades for query, grades in qrels.items()) >= 0.9 * len(qrels)


@pytest.mark.e2e
def test_training_triples_are_made(commands: Path) -> None:
    statistics = run("annotate", commands)
    path = commands / "builds/sample-raw/triples/triples.jsonl"
    triples = [record for _, record in read_jsonl(path)]
    assert len(triples) == statistics["triples"] >= 100
    assert statistics["cleaning"]["documents"]["anonymized"] > 0
    texts = [text for triple in triples for text in triple["positives"] + triple["negatives"]]
    assert not any("<p>" in text or "0000" in text for text in texts)
    assert max(len(triple["negatives"]) for triple in triples) == 8
