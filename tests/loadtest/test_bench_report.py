import json

import pytest

from loadtest.bench import __main__ as command
from loadtest.bench import environment, report
from loadtest.bench.figures import at_least, at_most, medians
from loadtest.bench.options import BenchError

ENVIRONMENT = {
    "date": "2026-01-02T03:04:05+00:00",
    "commit": {"id": "0123456789abcdef", "changed": True},
    "hardware": {
        **{"processor": "Some CPU", "processors": 2, "memory_bytes": 8 * 2**30},
        "load_average": [0.25, 0.5, 1.0],
    },
    "versions": {"python": "3.11.7"},
    "other_environments": {".venv-bench": {"torch": "2.13.0"}},
}
OPTIONS = {"index": "sample", "pair": "care-mini", "rounds": 3, "seconds": 8}


def test_a_figure_on_its_goal_meets_it():
    assert at_least("a", 0.88, 0.88)["met"]
    assert not at_least("a", 0.8799, 0.88)["met"]
    assert at_most("a", 1.0, 1.0)["met"]
    assert not at_most("a", 1.0001, 1.0)["met"]
    assert not at_most("a", None, 1.0)["met"]


def test_medians_are_of_numbers_only():
    rounds = [{"qps": 3.0, "http": {}}, {"qps": 1.0, "http": {}}, {"qps": 2.0, "http": {}}]
    assert medians(rounds) == {"qps": 2.0}


def test_the_table_holds_every_figure_and_what_failed(tmp_path):
    figures = [
        at_least("throughput", 0.912, 0.88, note="91 of 100 | a pipe"),
        at_most("latency", 1.5, 1.0, unit="ms"),
    ]
    scenarios = {"one": {"figures": figures}, "two": {"error": "wrk is missing\nmore"}}
    result = {"environment": ENVIRONMENT, "options": OPTIONS, "scenarios": scenarios}
    path = report.write(result, tmp_path / "results" / report.BENCH_NAME)
    rows = [line for line in path.read_text().splitlines() if line.startswith("| ")]
    assert rows[1:] == [
        "| throughput | 0.91 | ≥ 0.88 | yes | `make bench ONLY=one` | 91 of 100 \\| a pipe |",
        "| latency | 1.50 ms | ≤ 1 ms | no | `make bench ONLY=one` |  |",
        "| two | not measured |  | no | `make bench ONLY=two` | wrk is missing |",
    ]
    assert "commit 0123456789ab, with changed files" in path.read_text()
    assert "load average before the run 0.2" in path.read_text()
    assert json.loads((tmp_path / "results" / "bench.json").read_text()) == result


def test_a_scenario_that_fails_does_not_lose_the_others(tmp_path, monkeypatch, capsys):
    def fail(_):
        raise BenchError("no such thing")

    def succeed(_):
        return {"figures": [at_least("throughput", 2.0, 1.0)]}

    runs = {"idle": fail, "cache": succeed}
    monkeypatch.setattr(command, "_scenario", runs.get)
    monkeypatch.setattr(environment, "describe", lambda _: ENVIRONMENT)
    arguments = ["--queries", "q.jsonl", "--out", str(tmp_path), "--only", "idle,cache"]
    assert command.main(arguments) == 1
    scenarios = json.loads((tmp_path / "bench.json").read_text())["scenarios"]
    assert scenarios["idle"]["error"] == "no such thing"
    assert scenarios["cache"]["figures"][0]["met"]
    assert "not measured: no such thing" in capsys.readouterr().out


def test_every_scenario_is_there():
    for name in command.SCENARIOS.values():
        assert callable(__import__(f"loadtest.bench.{name}", fromlist=["run"]).run)


def test_an_unknown_scenario_is_refused(capsys):
    with pytest.raises(SystemExit):
        command.main(["--queries", "q.jsonl", "--only", "idle,speed"])
    assert "choose from efficiency" in capsys.readouterr().err


def test_the_processor_is_named():
    assert environment.processor_model("processor : 0\nmodel name\t: Some CPU @ 2: GHz\n") == (
        "Some CPU @ 2: GHz"
    )
    assert environment.processor_model("")


def test_the_tables_are_of_all_results_in_the_folder(tmp_path):
    start = {
        "environment": ENVIRONMENT,
        "options": {"vectors": 1000, "dimension": 256, "links": 8},
        "index_bytes": {"vectors.faiss": 2**30},
        "figures": [at_most("process start to ready", 1.5, 2.0, unit="s")],
    }
    entry = {"engine": "Flat", "parameters": {}, "recall": 1.0, "alone_per_second": 5.4}
    entry |= {"alone_p99_ms": 0.5, "batch_per_second": 9.0, "bytes": 2e6, "build_seconds": 3.2}
    scale = {
        "environment": ENVIRONMENT,
        "options": {
            **{"vectors": 1000, "dimension": 256, "queries": 10, "threads": 2},
            "construction": 40,
        },
        "defaults": {"0.95": [entry]},
    }
    report.write(start, tmp_path / "start-1000.json")
    text = report.write(scale, tmp_path / "scale-1000.json").read_text()
    assert "| process start to ready | 1.50 s | ≤ 2 s | yes | `make bench-start" in text
    assert "| 0.95 | Flat |  | 1.0000 | 5 | 0.50 | 9 | 2 | 3 |" in text
    assert "Over HTTP" not in text
