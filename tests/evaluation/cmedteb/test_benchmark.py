from pathlib import Path

import pytest

from core.errors import CareError
from evaluation.cmedteb.benchmark import load_systems, run_benchmark
from evaluation.cmedteb.report import write_report
from evaluation.cmedteb.results import compare_systems
from evaluation.cmedteb.tasks import TASKS, find_tasks
from evaluation.trec import read_run
from models.pairs import load_pair, write_pair
from tests.errors import raises
from tests.evaluation.cmedteb.data import Encoders, write_data

pytestmark = pytest.mark.train


def test_systems_are_scored_compared_and_reported(tmp_path: Path) -> None:
    tasks = find_tasks(str(write_data(tmp_path / "data")), "test")
    out = tmp_path / "out"
    cache = tmp_path / "cache"
    systems = load_systems(["care-mini", "bm25"], cache, load=Encoders().load)
    assert [system.name for system in systems] == ["care-mini", "bm25"]
    table = run_benchmark(systems[:1], tasks, out)
    assert "bm25" not in table
    table = run_benchmark(systems[1:], tasks, out)
    assert {line.split(" ")[1] for line in table.splitlines()[2:4]} == {"bm25", "care-mini"}
    assert (out / "table.md").read_text("utf-8") == table

    assert "| Retrieval |" in compare_systems(out, "care-mini", "bm25")
    with raises(CareError, code="unknown_system", system="other"):
        compare_systems(out, "care-mini", "other")
    assert write_report(out, tasks, failures=1).read_text("utf-8").count("<svg") == len(tasks)


def test_bm25_has_two_analyzers(tmp_path: Path) -> None:
    tasks = find_tasks(str(write_data(tmp_path / "data")), "test")
    systems = load_systems(["bm25", "bm25-characters"], tmp_path)
    run_benchmark(systems, tasks, tmp_path / "out")
    words, characters = (
        read_run(tmp_path / "out" / system.name / "retrieval.trec") for system in systems
    )
    assert words.keys() == characters.keys()
    assert words != characters


def test_a_pair_with_instructions_of_a_file_is_another_system(tmp_path: Path) -> None:
    pair = load_pair("care-mini")
    told = pair.query.model_copy(update={"prompt": "Instruct: find\nQuery:"})
    write_pair(pair.model_copy(update={"name": "told", "query": told}), tmp_path / "told.toml")
    names = ["care-mini", str(tmp_path / "told.toml"), "bm25"]
    for file, expected in ((None, "told"), (tmp_path / "table-8.toml", "told+table-8")):
        systems = load_systems(names, tmp_path, instructions=file, load=Encoders().load)
        assert [system.name for system in systems] == ["care-mini", expected, "bm25"]


def test_tasks_are_found_by_name(tmp_path: Path) -> None:
    data = str(write_data(tmp_path / "data"))
    assert list(find_tasks(data, "test")) == list(TASKS[:5])
    assert [known.name for known in find_tasks(data, "test", None, ["sts", "rerank"])] == [
        "sts",
        "rerank",
    ]
    with raises(CareError, code="missing_task", task="medical-retrieval"):
        find_tasks(data, "test", None, ["medical-retrieval"])
    with raises(CareError, code="unknown_task", task="translation"):
        find_tasks(data, "test", None, ["translation"])


@pytest.mark.parametrize(
    ("name", "code"), [("care-mini", "duplicate_system"), ("a/b", "bad_system_name")]
)
def test_two_systems_cannot_have_the_same_folder(tmp_path: Path, name: str, code: str) -> None:
    path = tmp_path / "other.toml"
    write_pair(load_pair("care-mini").model_copy(update={"name": name}), path)
    with raises(CareError, code=code, system=name):
        load_systems(["care-mini", str(path)], tmp_path / "cache", load=Encoders().load)
