from pathlib import Path

import yaml

from core.errors import CareError
from curation.commands import run_command
from tests.curation.endpoints import grader, scripted_server
from tests.errors import raises


def test_a_command_returns_statistics_and_costs(data: Path, tmp_path: Path) -> None:
    def grade(_: str, query: str, text: str) -> str:
        return "S" if query[:2] in text else "C"

    with scripted_server(grader(grade)) as url:
        facts = {
            "corpus": "data/corpus.jsonl",
            "queries": "data/queries.jsonl",
            "output": "out",
            "retrievers": [{"kind": "bm25"}],
            "judges": [{"name": "one", "model": "one", "base_url": url, "input_price": 1e6}],
        }
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(facts), encoding="utf-8")
        found = run_command("annotate", path)
        again = run_command("annotate", path)
    assert (found["queries"], found["cost_calls"], found["cost_reused"]) == (2, 2, 0)
    assert (again["cost_calls"], again["cost_reused"]) == (2, 2)
    assert found["cost_price"] == found["cost_prompt_tokens"]
    assert found["output"] == str(tmp_path / "out")


def test_a_wrong_file_is_named(tmp_path: Path) -> None:
    with raises(CareError, code="unreadable"):
        run_command("sts", tmp_path / "none.yaml")
