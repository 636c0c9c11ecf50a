from pathlib import Path
from typing import Any

from core.errors import CareError
from curation.benchmark import build_benchmark
from curation.config import BenchmarkConfig
from tests.curation.judges import THREE, lines, run
from tests.errors import raises


def test_a_pool_from_a_run_file_and_a_pair(facts: dict[str, Any], data: Path) -> None:
    path = data / "other.trec"
    path.write_text("q1 Q0 d3 1 9.5 x\nq1 Q0 gone 2 9.0 x\nq1 Q0 d2 3 8.0 x\n", encoding="utf-8")
    retrievers = [
        {"kind": "run", "name": "other", "path": path},
        {"kind": "pair", "pair": "care-mini"},
    ]
    statistics, _ = run(
        BenchmarkConfig,
        build_benchmark,
        facts | {"retrievers": retrievers, "depth": 2},
        *THREE,
    )
    judged = lines(facts["output"] / "judgements.jsonl")
    assert {"d3", "d2", "d1"} <= {row["corpus-id"] for row in judged if row["query-id"] == "q1"}
    assert len({row["corpus-id"] for row in judged if row["query-id"] == "q2"}) == 2
    assert statistics["pool"]["queries"] == 2


def test_a_run_of_other_queries_is_an_error(facts: dict[str, Any], data: Path) -> None:
    path = data / "other.trec"
    path.write_text("q1 Q0 gone 1 9.5 x\nq7 Q0 d1 1 9.5 x\n", encoding="utf-8")
    retrievers = [{"kind": "run", "name": "other", "path": path}]
    with raises(CareError, code="run_of_other_data", path=path):
        run(BenchmarkConfig, build_benchmark, facts | {"retrievers": retrievers}, "first")
