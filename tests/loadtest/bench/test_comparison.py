"""Comparison with another system, which this project's encoder replaces."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from core.errors import CareError
from loadtest.bench.comparison import compare, infinity
from loadtest.bench.options import ServiceOptions
from tests.errors import raises

ROOT = Path(__file__).parents[3]


def _compare(options: ServiceOptions, weights: Path) -> dict[str, Any]:
    weights.mkdir()
    application = "tests.loadtest.bench.other_app"
    return compare(options, "a system", application, Path(sys.executable), weights, goal=1.0)


@pytest.fixture(autouse=True)
def modules_of_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes modules of the tests importable: the other system runs in the folder of its model."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.mark.e2e
@pytest.mark.usefixtures("wrk")
def test_both_systems_are_measured_at_two_numbers_of_clients(
    options: ServiceOptions, tmp_path: Path
) -> None:
    found = _compare(options, tmp_path / "same")
    assert min(found["cosines"]) > 0.9999
    assert [figure["reached"] for figure in found["figures"]] == [1.0, 1.0]
    assert [entry["clients"] for entry in found["rounds"]] == [8, options.connections]
    assert found["rss_bytes"]["theirs"] > 2**20


@pytest.mark.e2e
@pytest.mark.usefixtures("wrk")
def test_different_vectors_are_an_error(options: ServiceOptions, tmp_path: Path) -> None:
    with raises(CareError, "other_vectors"):
        _compare(options, tmp_path / "other")


def test_a_system_that_is_not_installed_is_an_error(
    options: ServiceOptions, tmp_path: Path
) -> None:
    python = tmp_path / "bin/python"
    with raises(CareError, "baseline_missing", path=python):
        infinity(replace(options, infinity=python))
