"""The wheel: contents, licences and size, and that it works without the checkout."""

import hashlib
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGES = PROJECT["tool"]["importlinter"]["root_packages"]
MAX_BYTES = 80 * 10**6


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that pip builds from the checked-out files."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    unwanted = shutil.ignore_patterns(
        ".*", "*.egg-info", "__pycache__", "build", "builds", "indexes"
    )
    shutil.copytree(ROOT, source, ignore=unwanted)
    build = f"from setuptools.build_meta import build_wheel; build_wheel({str(folder)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as files:
        return set(files.namelist())


def test_the_wheel_is_small_enough(wheel: Path) -> None:
    assert wheel.stat().st_size <= MAX_BYTES


def test_the_wheel_contains_all_files_of_the_packages_except_results(names: set[str]) -> None:
    """Including weights, registry, recipes, templates, word lists and the search page."""
    expected = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and not {"results", "__pycache__"} & set(path.parts)
    }
    # care/data is a link to data.
    expected |= {
        f"care/{path.relative_to(ROOT).as_posix()}"
        for pattern in ("sample/*.*", "sample/qrels/*", "unanswerable/*")
        for path in (ROOT / "data").glob(pattern)
    }
    carried = {name for name in names if ".dist-info/" not in name}
    assert carried == expected
    for name in (
        "models/care-mini/query.onnx",
        "service/routes/page/index.html",
        "care/data/sample/corpus.jsonl",
        "training/experiments/phrases.yaml",
    ):
        assert name in carried


def test_the_demo_of_the_wheel_needs_no_checkout(wheel: Path, tmp_path: Path) -> None:
    installed, folder = tmp_path / "installed", tmp_path / "folder"
    with zipfile.ZipFile(wheel) as files:
        files.extractall(installed)
    folder.mkdir()
    environment = {name: text for name, text in os.environ.items() if "CARE_" not in name}
    done = subprocess.run(
        [sys.executable, "-m", "care", "demo", "--check", "--port", "0"],
        cwd=folder,
        env=environment | {"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("问：") == 4
    assert {path.name for path in folder.iterdir()} == {"builds", "indexes"}
    version = subprocess.run(
        [sys.executable, "-m", "care", "--version"],
        cwd=folder,
        env=environment | {"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
    )
    assert version.stdout == f"care-retrieval {PROJECT['project']['version']}\n"


def test_the_wheel_contains_the_licences(wheel: Path, names: set[str]) -> None:
    (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
    folder = metadata.removesuffix("METADATA")
    assert {f"{folder}licenses/LICENSE", f"{folder}licenses/THIRD_PARTY.md"} <= names
    with zipfile.ZipFile(wheel) as files:
        facts = Parser().parsestr(files.read(metadata).decode())
    assert facts["License-Expression"] == "Apache-2.0 AND MIT"


def test_pip_keeps_this_distribution_when_an_extra_is_added(tmp_path: Path) -> None:
    """Even if another package of its name is on the package index."""
    name = "care_retrieval-99.0"
    with zipfile.ZipFile(tmp_path / f"{name}-py3-none-any.whl", "w") as files:
        facts = (
            "Metadata-Version: 2.1\nName: care-retrieval\nVersion: 99.0\nProvides-Extra: rerank\n"
        )
        tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        for file, text in (("METADATA", facts), ("WHEEL", tags), ("RECORD", "")):
            files.writestr(f"{name}.dist-info/{file}", text)
    pip = [sys.executable, "-m", "pip", "--isolated", "install", "--dry-run", "--no-index"]
    taken = [
        subprocess.run(
            [*pip, "--find-links", str(tmp_path), *more, "care-retrieval[rerank]"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for more in ([], ["--upgrade", "--no-deps"])
    ]
    assert ["Would install" in output for output in taken] == [False, True]


@pytest.mark.parametrize("side", ["query", "document"])
def test_the_weights_have_the_checksums_of_the_registry(wheel: Path, side: str) -> None:
    with zipfile.ZipFile(wheel) as files:
        spec = tomllib.loads(files.read("models/registry/care-mini.toml").decode())[side]
        for part in ("weights", "tokenizer"):
            content = files.read(f"models/care-mini/{Path(spec[part]).name}")
            assert hashlib.sha256(content).hexdigest() == spec[f"{part}_sha256"]
