"""Pytest plugin: skips files by markers, orders suites, prints their times, ends a hung exit.

Loaded by `-p tests.suites` (pyproject.toml).
"""

import faulthandler
import re
from collections import Counter
from pathlib import Path

import pytest

# Markers of all tests of a file or, in conftest.py, of a folder. pytest imports a file before it
# deselects its tests, but the libraries that the file imports may not be installed.
_FILE_MARKERS = re.compile(r"^pytestmark = (?:\[[^\]]*\]|.*$)", re.MULTILINE)
_MARKER = re.compile(r"\bpytest\.mark\.(\w+)")
_EXCLUDED = re.compile(r"\bnot (\w+)")
_SECONDS_TO_END = 120
# The suites that take longest, in process and with processes.
_LONGEST_SUITES = ("training", "docs", "e2e")


def suite_of(test: str) -> str:
    """Returns the suite of a test id: its folder in tests/, with two levels in tests/engines."""
    *folders, _ = test.partition("::")[0].removeprefix("tests/").split("/")
    return "/".join(folders[: 2 if folders[:1] == ["engines"] else 1]) or "tests"


def excluded_markers(expression: str) -> set[str]:
    """Returns the markers that an expression like `not train and not e2e` excludes."""
    return set() if re.search(r"\bor\b|\(", expression) else set(_EXCLUDED.findall(expression))


def wanted_markers(expression: str) -> set[str]:
    """Returns the markers of which an expression like `e2e or browser` wants one."""
    return set(expression.split(" or ")) if re.fullmatch(r"\w+( or \w+)*", expression) else set()


def file_markers(path: Path) -> set[str]:
    """Returns the markers of all tests of a file, or of a folder with a conftest.py."""
    path = path / "conftest.py" if path.is_dir() else path
    if path.suffix != ".py" or not path.is_file():
        return set()
    found = _FILE_MARKERS.search(path.read_text(encoding="utf-8"))
    return set(_MARKER.findall(found[0])) if found else set()


def named_markers(path: Path) -> set[str]:
    """Returns the markers that a file, or one of the test files in a folder, names."""
    files = path.rglob("test_*.py") if path.is_dir() else [path]
    return {name for file in files for name in _MARKER.findall(file.read_text(encoding="utf-8"))}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignores files and folders whose tests a marker expression does not select, without importing
    them or their conftest.py.
    """
    expression = config.option.markexpr
    excluded, wanted = excluded_markers(expression), wanted_markers(expression)
    if excluded and file_markers(collection_path) & excluded:
        return True
    has_conftest = (collection_path / "conftest.py").is_file()
    if wanted and (has_conftest or collection_path.match("test_*.py")):
        return None if named_markers(collection_path) & wanted else True
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Moves the longest suites to the front, so that workers of pytest-xdist end together."""
    items.sort(key=lambda item: suite_of(item.nodeid) not in _LONGEST_SUITES)


class SuiteTimes:
    """Sums the duration of the tests of each suite, and prints it at the end."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.tests: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Adds the duration of set-up, call and tear-down of a test."""
        suite = suite_of(report.nodeid)
        self.seconds[suite] += report.duration
        self.tests[suite] += report.when == "call"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Prints the duration of the suites in descending order."""
        if self.seconds:
            terminalreporter.section("seconds per suite")
            for suite, seconds in self.seconds.most_common():
                line = f"{suite:<24}{seconds:>8.1f} s {self.tests[suite]:>6} tests"
                terminalreporter.write_line(line)


def pytest_configure(config: pytest.Config) -> None:
    """Registers the plugin in the main process, to which workers of pytest-xdist report."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(SuiteTimes(), "suite-times")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Fails a process that does not end after its tests, and prints where its threads wait."""
    if not hasattr(config, "workerinput"):
        faulthandler.dump_traceback_later(_SECONDS_TO_END, exit=True)
