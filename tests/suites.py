"""Suites of tests: their markers, which files a run reads, and how long each suite took.

Loaded by `-p tests.suites` (pyproject.toml).
"""

import re
from collections import Counter
from pathlib import Path

import pytest

# A file whose tests all have a marker: pytest would import it before it deselects them, and what
# it imports may not be installed. In conftest.py it stands for the folder.
_FILE_MARKERS = re.compile(r"^pytestmark = (?:\[[^\]]*\]|.*$)", re.MULTILINE)
_MARKER = re.compile(r"\bpytest\.mark\.(\w+)")
_EXCLUDED = re.compile(r"\bnot (\w+)")


def suite_of(test: str) -> str:
    """Returns the suite of a test's id: its folder in tests/, or in tests/engines two levels."""
    *folders, _ = test.partition("::")[0].removeprefix("tests/").split("/")
    return "/".join(folders[: 2 if folders[:1] == ["engines"] else 1]) or "tests"


def excluded_markers(expression: str) -> set[str]:
    """Returns the markers that an expression like `not train and not e2e` leaves out."""
    return set() if re.search(r"\bor\b|\(", expression) else set(_EXCLUDED.findall(expression))


def file_markers(path: Path) -> set[str]:
    """Returns the markers of all tests of a file, or of a folder with a conftest.py."""
    path = path / "conftest.py" if path.is_dir() else path
    if path.suffix != ".py" or not path.is_file():
        return set()
    found = _FILE_MARKERS.search(path.read_text(encoding="utf-8"))
    return set(_MARKER.findall(found[0])) if found else set()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out, without importing them, files whose markers the run leaves out."""
    excluded = excluded_markers(config.option.markexpr)
    return True if excluded and file_markers(collection_path) & excluded else None


class SuiteTimes:
    """Adds up the seconds of the tests of each suite, and prints them at the end."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.tests: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Counts set-up, call and tear-down of a test."""
        suite = suite_of(report.nodeid)
        self.seconds[suite] += report.duration
        self.tests[suite] += report.when == "call"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Prints the suites, the slowest first."""
        if self.seconds:
            terminalreporter.section("seconds per suite")
            for suite, seconds in self.seconds.most_common():
                line = f"{suite:<24}{seconds:>8.1f} s {self.tests[suite]:>6} tests"
                terminalreporter.write_line(line)


def pytest_configure(config: pytest.Config) -> None:
    """Counts in the process that prints; workers of pytest-xdist report to it."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(SuiteTimes(), "suite-times")
