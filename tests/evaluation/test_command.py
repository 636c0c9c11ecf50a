import json
import re
from pathlib import Path

import pytest

from core.types import Document
from evaluation.__main__ import judgement_coverage, main
from indexer.__main__ import main as indexer
from tests.conftest import ADMIN_KEY, SEARCH_KEY, make_records, write_jsonl
from tests.errors import error_code

CHUNKS = [Document(f"a#{i}", "t", parent="a", chunk=i, chunks=3) for i in range(3)] + [
    Document("b", "t", parent="b"),
    Document("c", "t"),
]


def warnings(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("warning: ")]


def test_judged_documents_that_the_index_lacks_are_counted() -> None:
    qrels = {
        "found": {"a": 1, "gone": 1},
        "lost": {"gone": 1, "b": 0},
        "none relevant": {"c": 0},
    }
    assert judgement_coverage(qrels, CHUNKS) == {
        "judged_documents": 4,
        "judged_documents_not_indexed": 1,
        "queries_without_indexed_answer": 2,
    }


def test_judgements_of_an_unknown_query(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    queries = write_jsonl(tmp_path / "queries.jsonl", [{"_id": "q", "text": "t"}])
    (tmp_path / "qrels.tsv").write_text("other\td\t1\n", encoding="utf-8")
    words = ["--index", "x", "--queries", str(queries), "--qrels", str(tmp_path / "qrels.tsv")]
    assert main(words) == 1
    assert error_code(capsys.readouterr().err) == "unknown_query"


@pytest.mark.e2e
def test_an_index_of_chunks_is_scored_by_judgements_of_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Settings of the shell, for a service of the user's own: the one that is started has none.
    monkeypatch.setenv("CARE_API_KEYS", f"{ADMIN_KEY},{SEARCH_KEY}")
    subjects = make_records(4)
    # Each document is of its subject in the last sentences alone.
    fill = "今天天气很好，大家一起出去散步。" * 12
    records = [r | {"title": "", "text": fill + r["text"] * 4} for r in subjects]
    queries = [{"_id": r["_id"], "text": r["text"]} for r in subjects]
    judged = "".join(f"{r['_id']}\t{r['_id']}\t1\n" for r in subjects)
    (tmp_path / "qrels.tsv").write_text(judged, encoding="utf-8")
    corpus = write_jsonl(tmp_path / "corpus.jsonl", records)
    places = ["--index", "long", "--indexes", str(tmp_path / "indexes")]
    build = ["build", "--corpus", str(corpus), "--builds", str(tmp_path / "builds"), *places]
    assert indexer([*build, "--chunk-tokens", "48"]) == 0
    capsys.readouterr()

    arguments = ["--queries", str(write_jsonl(tmp_path / "queries.jsonl", queries))]
    arguments += ["--qrels", str(tmp_path / "qrels.tsv"), "--output", str(tmp_path / "scores.json")]
    assert main([*places, *arguments]) == 0
    shown = capsys.readouterr()
    assert "1.0000" in shown.out and not warnings(shown.err)
    result = json.loads((tmp_path / "scores.json").read_text("utf-8"))
    assert [values["nDCG@10"] for values in result["scores"].values()] == [1, 1]
    assert result["coverage"]["judged_documents"] == 4

    # Judgements of a larger corpus: the index holds half of what is judged.
    with (tmp_path / "qrels.tsv").open("a", encoding="utf-8") as qrels:
        qrels.writelines(f"{r['_id']}\tother-{r['_id']}\t1\n" for r in subjects)
    assert main([*places, *arguments]) == 0
    (warning,) = warnings(capsys.readouterr().err)
    assert re.findall(r"\d+", warning)[:3] == ["4", "8", "0"]
    result = json.loads((tmp_path / "scores.json").read_text("utf-8"))
    assert result["coverage"] == {
        "judged_documents": 8,
        "judged_documents_not_indexed": 4,
        "queries_without_indexed_answer": 0,
    }
