"""Optional dependencies of commands."""

import pytest

from care import extras
from care.cli.main import main
from care.diagnosis import packages
from care.gpu_builds import installed
from core.errors import CareError
from tests.errors import error_code, raises


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of packages that are not found."""
    names: set[str] = set()

    monkeypatch.setattr(extras, "installed", lambda name: name not in names and installed(name))
    return names


def test_packages_of_an_extra_that_are_missing_are_named(without: set[str]) -> None:
    extras.require("eval", "curation")
    without |= {"bm25s", "openai", "numpy"}
    assert extras.missing("eval") == ["bm25s"]
    with raises(
        CareError, "not_installed", extras=["eval", "curation"], packages=["bm25s", "openai"]
    ) as caught:
        extras.require("eval", "curation", make="evaluate")
    assert "pip install 'care-retrieval[eval,curation]'" in str(caught.value)
    assert "make evaluate" in str(caught.value)


def test_an_extra_that_an_older_installation_lacks_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with raises(CareError, "not_installed", extras=["new"]):
        extras.require("new")
    monkeypatch.setattr(packages, "_EXTRAS", {"new": "care new", "eval": "care evaluate"})
    found = {finding.check: finding.status for finding in packages.check_packages()}
    assert (found["extra new"], found["extra eval"]) == ("error", "ok")


@pytest.mark.parametrize(
    ("package", "command"),
    [
        ("bm25s", ["evaluate", "--index", "x", "--queries", "q", "--qrels", "r"]),
        ("jieba", ["cmedteb", "compare", "a", "b", "--out", "o"]),
        ("jieba", ["curate", "sts", "c"]),
        ("bm25s", ["ablations", "--data", "d"]),
        ("jieba", ["phrases", "r", "--out", "o"]),
        ("psutil", ["bench", "service"]),
        ("rapidocr", ["index", "c.jsonl", "--index", "x", "--ocr"]),
    ],
)
def test_a_command_without_its_packages_is_one_line(
    without: set[str], package: str, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    without.add(package)
    assert main(command) == 1
    shown = capsys.readouterr()
    assert error_code(shown.err) == "not_installed" and package in shown.err
    assert (shown.out, shown.err.count("\n")) == ("", 1)
