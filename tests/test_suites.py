"""The pytest plugin for suites: ignored files and printed durations."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.suites import (
    excluded_markers,
    file_markers,
    named_markers,
    suite_of,
    wanted_markers,
)

TESTS = Path(__file__).parent
MISSING = """
import pytest
{line}
import no_such_library

def test_it():
    assert no_such_library
"""


@pytest.mark.parametrize(
    ("test", "suite"),
    [
        ("tests/test_suites.py::test_it", "tests"),
        ("tests/core/test_text.py::test_it[a::b]", "core"),
        ("tests/training/export/test_onnx.py::test_it", "training"),
        ("tests/engines/vllm/test_build.py::test_it", "engines/vllm"),
    ],
)
def test_the_suite_of_a_test_is_its_folder(test: str, suite: str) -> None:
    assert suite_of(test) == suite


@pytest.mark.parametrize(
    ("expression", "excluded", "wanted"),
    [
        ("", set(), set()),
        ("train", set(), {"train"}),
        ("e2e or browser", set(), {"e2e", "browser"}),
        ("not train", {"train"}, set()),
        ("not train and not e2e", {"train", "e2e"}, set()),
        ("browser and not e2e", {"e2e"}, set()),
        ("e2e and not train", {"train"}, set()),
        ("not train or e2e", set(), set()),
        ("not (train and e2e)", set(), set()),
        ("not (train or e2e)", set(), set()),
    ],
)
def test_markers_that_a_run_excludes_or_of_which_it_wants_one(
    expression: str, excluded: set[str], wanted: set[str]
) -> None:
    assert excluded_markers(expression) == excluded
    assert wanted_markers(expression) == wanted


def test_markers_that_a_file_names(tmp_path: Path) -> None:
    path = tmp_path / "test_it.py"
    path.write_text("@pytest.mark.e2e\ndef test_it(): pass\n\n\n# train\n")
    assert named_markers(path) == {"e2e"}


@pytest.mark.parametrize(
    ("line", "markers"),
    [
        ("pytestmark = pytest.mark.train", {"train"}),
        ("pytestmark = [pytest.mark.train, pytest.mark.e2e]", {"train", "e2e"}),
        ("pytestmark = [\n    pytest.mark.train,\n    pytest.mark.e2e,\n]", {"train", "e2e"}),
        ("def test_it():\n    pytestmark = pytest.mark.train", set()),
    ],
)
def test_markers_of_a_file_or_its_folder(line: str, markers: set[str], tmp_path: Path) -> None:
    assert file_markers(tmp_path) == set()
    path = tmp_path / "conftest.py"
    path.write_text(f"import pytest\n\n{line}\n")
    assert file_markers(path) == file_markers(tmp_path) == markers


@pytest.mark.e2e
def test_excluded_files_are_not_imported_and_suites_are_timed(tmp_path: Path) -> None:
    line = "pytestmark = pytest.mark.train"
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = train: needs torch\n")
    (tmp_path / "test_torch.py").write_text(MISSING.format(line=line))
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "conftest.py").write_text(MISSING.format(line=line))
    (tmp_path / "inner" / "test_inner.py").write_text("def test_it(): pass\n")
    (tmp_path / "test_fast.py").write_text("def test_it(): pass\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.suites", str(tmp_path)]

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *arguments], cwd=TESTS.parent, capture_output=True, text=True, check=False
        )

    fast = run("-m", "not train")
    assert fast.returncode == 0, fast.stdout
    (times,) = [row for row in fast.stdout.splitlines() if row.endswith(" tests")]
    assert times.split()[0::4] == ["tests", "tests"]
    assert times.split()[3] == "1"
    assert run().returncode == 2
