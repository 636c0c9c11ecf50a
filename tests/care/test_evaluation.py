import warnings
from pathlib import Path

import pytest

import care
from core.errors import QueryError
from tests.conftest import Builder, make_records, write_jsonl
from tests.errors import raises

pytestmark = pytest.mark.usefixtures("test_encoders")


@pytest.fixture
def queries(tmp_path: Path) -> Path:
    # The texts of the first two documents.
    records = [{"_id": f"q{i}", "text": record["text"]} for i, record in enumerate(make_records(2))]
    return write_jsonl(tmp_path / "queries.jsonl", records)


def write_qrels(path: Path, rows: list[tuple[str, str, int]]) -> Path:
    lines = ["query-id\tcorpus-id\tscore", *("\t".join(map(str, row)) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_an_index_is_scored_on_judged_queries(
    build_version: Builder, indexes: Path, pair_file: Path, queries: Path, tmp_path: Path
) -> None:
    build_version(make_records(30))
    qrels = write_qrels(tmp_path / "qrels.tsv", [("q0", "d0000", 1), ("q1", "d0001", 1)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scores = care.evaluate(
            "test", queries=queries, qrels=qrels, pair=str(pair_file), indexes=indexes
        )
        lexical = care.evaluate(
            "test",
            queries=queries,
            qrels=qrels,
            pair=str(pair_file),
            indexes=indexes,
            mode="lexical",
        )
    assert scores == {"nDCG@10": 1, "MRR@10": 1, "Recall@10": 1, "Recall@100": 1}
    assert lexical["Recall@100"] == 1


def test_a_mode_that_the_index_lacks(
    build_version: Builder, indexes: Path, pair_file: Path, queries: Path, tmp_path: Path
) -> None:
    build_version(make_records(3), full_text=False)
    qrels = write_qrels(tmp_path / "qrels.tsv", [("q0", "d0000", 1)])
    places = {"pair": str(pair_file), "indexes": indexes}
    with raises(QueryError, "mode_not_available"):
        care.evaluate("test", queries=queries, qrels=qrels, mode="hybrid", **places)


def test_judged_documents_that_the_index_lacks_are_a_warning(
    build_version: Builder, indexes: Path, pair_file: Path, queries: Path, tmp_path: Path
) -> None:
    build_version(make_records(30))
    qrels = write_qrels(tmp_path / "qrels.tsv", [("q0", "d0000", 1), ("q1", "elsewhere", 1)])
    with pytest.warns(UserWarning, match="1 of 2"):
        scores = care.evaluate(
            "test", queries=queries, qrels=qrels, pair=str(pair_file), indexes=indexes
        )
    assert scores["Recall@100"] == 0.5


def test_judgements_that_are_all_zero_are_a_warning(
    build_version: Builder, indexes: Path, pair_file: Path, queries: Path, tmp_path: Path
) -> None:
    build_version(make_records(30))
    qrels = write_qrels(tmp_path / "qrels.tsv", [("q0", "d0000", 0), ("q1", "elsewhere", 0)])
    places = {"pair": str(pair_file), "indexes": indexes}
    with pytest.warns(UserWarning) as caught:
        scores = care.evaluate("test", queries=queries, qrels=qrels, **places)
    assert (len(caught), set(scores.values())) == (1, {0.0})
