import json
import os
from pathlib import Path

import pytest

from care.cli.main import main as care
from care.evaluation import compare_modes
from care.options import EvaluationOptions
from core.errors import CareError, IndexVersionError
from core.types import Document
from core.versions import IndexFolder
from evaluation.index_evaluation import IndexEvaluation, JudgementCoverage, judgement_coverage
from models.pairs import DEFAULT_PAIR
from tests.conftest import ADMIN_KEY, SEARCH_KEY, Builder, make_records, write_jsonl
from tests.errors import raises

CHUNKS = [Document(f"a#{i}", "t", parent="a", chunk=i, chunks=3) for i in range(3)] + [
    Document("b", "t", parent="b"),
    Document("c", "t"),
]


def compare(
    indexes: Path,
    index: str,
    queries: Path,
    qrels: Path,
    weights: str | None = None,
    pair: str = DEFAULT_PAIR,
) -> IndexEvaluation:
    options = EvaluationOptions(
        queries=queries, qrels=qrels, pairs=[pair], indexes=indexes, weights=weights
    )
    return compare_modes(index, options)


def test_judged_documents_that_the_index_lacks_are_counted() -> None:
    qrels = {
        "found": {"a": 1, "gone": 1},
        "lost": {"gone": 1, "b": 0},
        "none relevant": {"c": 0},
    }
    assert judgement_coverage(qrels, CHUNKS) == JudgementCoverage(4, 1, 2, 2)


@pytest.mark.usefixtures("test_encoders")
def test_weights_need_full_text(
    tmp_path: Path, build_version: Builder, indexes: Path, pair_file: Path
) -> None:
    build_version(make_records(3), full_text=False)
    queries = write_jsonl(tmp_path / "queries.jsonl", [{"_id": "q", "text": "t"}])
    qrels = tmp_path / "qrels.tsv"
    qrels.write_text("q\td\t1\n", encoding="utf-8")
    with raises(CareError, code="mode_not_available"):
        compare(indexes, "test", queries, qrels, "0.1", str(pair_file))


@pytest.mark.e2e
def test_the_scores_of_an_older_version_are_not_those_of_a_damaged_one(tmp_path: Path) -> None:
    records = make_records(4)
    queries = write_jsonl(
        tmp_path / "queries.jsonl", [{"_id": r["_id"], "text": r["text"]} for r in records]
    )
    qrels = tmp_path / "qrels.tsv"
    qrels.write_text("".join(f"{r['_id']}\t{r['_id']}\t1\n" for r in records), encoding="utf-8")
    indexes = tmp_path / "indexes"
    folders = ["--indexes", str(indexes), "--builds", str(tmp_path / "builds")]
    for count in (3, 4):
        corpus = write_jsonl(tmp_path / "corpus.jsonl", records[:count])
        assert care(["index", str(corpus), "--index", "x", *folders]) == 0
    os.truncate(indexes / "x" / IndexFolder(indexes, "x").active() / "vectors.faiss", 10)
    with raises(IndexVersionError, "wrong_size"):
        compare(indexes, "x", queries, qrels)


@pytest.mark.e2e
def test_an_index_of_chunks_is_scored_by_judgements_of_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Settings of the shell are for a service of the user: the one that is started ignores them.
    monkeypatch.setenv("CARE_API_KEYS", f"{ADMIN_KEY},{SEARCH_KEY}")
    subjects = make_records(20)
    # Only the last sentences of a document are about its subject.
    fill = "今天天气很好，大家一起出去散步。" * 12
    records = [r | {"title": "", "text": fill + r["text"] * 4} for r in subjects]
    queries = write_jsonl(
        tmp_path / "queries.jsonl", [{"_id": r["_id"], "text": r["text"]} for r in subjects]
    )
    qrels = tmp_path / "qrels.tsv"
    qrels.write_text("".join(f"{r['_id']}\t{r['_id']}\t1\n" for r in subjects), encoding="utf-8")
    corpus = write_jsonl(tmp_path / "corpus.jsonl", records)
    indexes = tmp_path / "indexes"
    places = ["--index", "long", "--indexes", str(indexes), "--builds", str(tmp_path / "builds")]
    assert care(["index", str(corpus), *places, "--chunk-tokens", "48"]) == 0

    result = compare(indexes, "long", queries, qrels, "0.1,0.2")
    systems = ["dense", "lexical", "hybrid", "BM25, words", "BM25, characters and bigrams"]
    assert list(result.comparison.scores) == systems
    assert {scores["nDCG@10"] for scores in result.comparison.scores.values()} == {1}
    assert result.mode == "hybrid"
    assert {name: d.value for name, d in result.comparison.differences.items()} == dict.fromkeys(
        systems[1:], 0
    )
    assert set(result.speeds) == {"hybrid", "dense", "lexical"}
    assert all(0 < speed.p50_ms <= speed.p99_ms for speed in result.speeds.values())
    assert result.timed == 20
    assert result.bytes_per_passage["vectors"] > 4 * 384
    assert result.bytes_per_passage["lexical"] > 0
    assert [each.weight for each in result.weights] == [0.1, 0.2]
    assert (result.index, result.documents, result.queries) == ("long", 20, 20)
    assert result.warning is None
    assert result.min_score and result.min_score.queries == 20
    assert result.min_score.relevant_kept >= 0.95
    written = json.loads(json.dumps(result.as_json()))
    assert written["coverage"]["judged_documents"] == 20
    assert written["min_score"]["min_score"] == result.min_score.min_score
    assert written["index"]["version"] == result.version
    assert written["scores"] == result.comparison.scores
    ones = {r["_id"]: 1.0 for r in subjects}
    assert written["ndcg_by_query"] == dict.fromkeys(systems, ones)
    assert written["lexical_weight"] is None

    # Judgements of a larger corpus: the index holds half of the judged documents.
    with qrels.open("a", encoding="utf-8") as file:
        file.writelines(f"{r['_id']}\tother-{r['_id']}\t1\n" for r in subjects)
    result = compare(indexes, "long", queries, qrels)
    assert result.coverage == JudgementCoverage(40, 20, 0, 40)
    assert result.warning
