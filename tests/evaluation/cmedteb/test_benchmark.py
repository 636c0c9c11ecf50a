from pathlib import Path

import pytest

from core.errors import CareError
from evaluation.cmedteb.evaluate import load_systems, run_benchmark
from evaluation.cmedteb.tasks import TASKS, find_tasks
from evaluation.trec import read_run
from models.pairs import load_pair, write_pair
from tests.errors import raises
from tests.evaluation.cmedteb.data import Encoders, write_data

pytestmark = pytest.mark.train


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
