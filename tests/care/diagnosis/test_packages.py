from importlib.metadata import version
from pathlib import Path

import pytest

from care import gpu_builds
from care.diagnosis import packages


def test_versions_are_compared_with_those_that_are_tested(tmp_path: Path) -> None:
    constraints = tmp_path / "constraints.txt"
    constraints.write_text(f"# tested\nnumpy=={version('numpy')}\nnot-installed==1\n")
    assert packages.check_versions(constraints).status == "ok"
    constraints.write_text("numpy==0.1\n")
    finding = packages.check_versions(constraints)
    assert finding.status == "warning"
    assert f"numpy {version('numpy')} (tested: 0.1)" in finding.message
    constraints.write_text("setuptools==0.1\n")
    assert packages.check_versions(constraints).status == "ok"
    assert packages.check_versions(tmp_path / "none").status == "ok"


def test_missing_extras_are_no_fault_and_name_their_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        packages, "missing", lambda extra: ["ray"] if extra == "distributed" else []
    )
    found = {finding.check: finding for finding in packages.check_packages()}
    assert found["extra distributed"].status == "optional"
    assert "pip install 'care-retrieval[distributed]'" in found["extra distributed"].advice
    assert (found["extra eval"].status, found["extra eval"].advice) == ("ok", "")


def test_missing_required_packages_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "installed", lambda name: None if name == "faiss-cpu" else "1")
    first = next(packages.check_packages())
    assert (first.status, first.message) == ("error", "not installed: faiss-cpu")


@pytest.mark.parametrize(
    ("versions", "status"),
    [
        ({"onnxruntime": "1.31.1"}, "ok"),
        ({"onnxruntime": "1.31.1+gpu", "onnxruntime-gpu": "1.31.1"}, "ok"),
        ({"onnxruntime": "1.31.1", "onnxruntime-gpu": "1.31.1"}, "error"),
        ({"onnxruntime-gpu": "1.31.1"}, "warning"),
        ({"onnxruntime": "1.31.1+gpu", "onnxruntime-gpu": "1.32.0"}, "warning"),
        ({"onnxruntime": "1.31.1+gpu"}, "error"),
        ({}, "error"),
    ],
)
def test_two_builds_of_a_library_and_a_replaceable_one_are_found(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], status: str
) -> None:
    monkeypatch.setattr(gpu_builds, "installed", versions.get)
    monkeypatch.setattr(packages, "installed", versions.get)
    finding = packages.check_build(gpu_builds.LIBRARIES[0])
    assert finding.status == status
    assert all(f"{name} {version}" in finding.message for name, version in versions.items()) or (
        status == "ok"
    )
    assert bool(finding.advice) == (status != "ok")
