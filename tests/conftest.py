import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from core.encoders import EncoderSpec
from core.locks import exclusive
from core.manifest import IndexManifest
from indexer.build import BuildOptions, build
from models.pairs import write_pair
from service.app import create_app
from service.settings import Settings
from tests.encoders import BigramEncoder, make_pair

# Settings of the caller, as `make test` exports them from its shell and defaults, are not a test's.
for _name in [name for name in os.environ if name.startswith("CARE_")]:
    del os.environ[_name]

SAMPLE = Path(__file__).parents[1] / "data" / "sample"
# The key "secret" with the role admin.
ADMIN_KEY = f"ops:admin:{hashlib.sha256(b'secret').hexdigest()}"
# The key "asks" with the role search.
SEARCH_KEY = f"app:search:{hashlib.sha256(b'asks').hexdigest()}"
DEPARTMENTS = ("心血管科", "儿科", "骨科")
SUBJECTS = ("高血压", "发热", "骨折", "咳嗽", "失眠", "腹泻", "头痛", "皮疹", "贫血", "便秘")


def make_records(count: int) -> list[dict[str, Any]]:
    """Returns records with distinct texts, three departments, and a rare and a common value."""
    return [
        {
            "_id": f"d{i:04d}",
            "title": f"{SUBJECTS[i % len(SUBJECTS)]}第{i}讲",
            "text": f"{SUBJECTS[i % len(SUBJECTS)]}患者第{i}号的护理要点，编号{i * 7919 % 10007}。",
            "metadata": {
                "department": DEPARTMENTS[i % len(DEPARTMENTS)],
                "rare": i == count // 2,
                "tags": ["门诊", f"组{i % 5}"],
            },
        }
        for i in range(count)
    ]


def write_jsonl(path: Path, records: Sequence[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(record, ensure_ascii=False) for record in records)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


Builder = Callable[..., IndexManifest]
# Tests of what survives a crash: they write to the disk as users' commands do.
_DURABLE = ("tests/indexer/test_life.py", "tests/indexer/test_versions.py", "tests/long/")


@pytest.fixture(autouse=True)
def no_fsync(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spares the tests the wait for the disk, two thirds of the time of a small build."""
    if not request.node.nodeid.startswith(_DURABLE):
        monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Takes back the variables that a test sets: `care serve` sets those of its options."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[None]:
    """Removes log handlers that a test adds: their streams are closed when it ends."""
    handlers, level = list(logging.root.handlers), logging.root.level
    yield
    for handler in set(logging.root.handlers) - set(handlers):
        logging.root.removeHandler(handler)
    logging.root.setLevel(level)


@pytest.fixture(scope="session")
def first_builds(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, IndexManifest]]:
    """A folder with a copy of each first build of a test, and the manifest of each."""
    return tmp_path_factory.mktemp("first"), {}


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `indexes` and `builds` of the sample corpus, built once for all processes."""
    from care.cli.main import main as care

    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    folder = folder / "sample"
    arguments = ["index", str(SAMPLE / "corpus.jsonl"), "--index", "sample", "--reuse"]
    # The other processes wait for it.
    arguments += ["--indexes", str(folder / "indexes"), "--builds", str(folder / "builds")]
    arguments += ["--threads", "2"]
    with exclusive(folder, "a build of the sample", wait=250):
        assert care(arguments) == 0
    return folder


@pytest.fixture
def build_version(tmp_path: Path, first_builds: tuple[Path, dict[str, IndexManifest]]) -> Builder:
    """Builds a version of index 'test' under `tmp_path / indexes` with the test encoder.

    If the index does not exist yet, a copy of an equal version of an earlier test takes its place.
    """
    copies, manifests = first_builds

    def run(records: Sequence[Mapping[str, Any]], **options: Any) -> IndexManifest:
        corpus = write_jsonl(tmp_path / "corpus.jsonl", records)
        key = hashlib.sha256(corpus.read_bytes() + repr(sorted(options.items())).encode())
        copy = copies / key.hexdigest()
        first = "stores" not in options and not (tmp_path / "indexes").exists()
        if first and copy.name in manifests:
            shutil.copytree(copy, tmp_path, dirs_exist_ok=True)
            return deepcopy(manifests[copy.name])
        space = options.pop("space", "bigrams-1")
        settings = {
            "corpus": str(corpus),
            "name": "test",
            "indexes": tmp_path / "indexes",
            "builds": tmp_path / "builds",
            "shard_size": 16,
            "batch_size": 4,
            "progress": False,
        }
        manifest, _ = build(
            BuildOptions(**(settings | options)),
            BigramEncoder("document", space),
            BigramEncoder("query", space),
        )
        if first and settings.items() <= (settings | options).items():
            for name in ("indexes", "builds"):
                shutil.copytree(tmp_path / name, copy / name)
            manifests[copy.name] = deepcopy(manifest)
        return manifest

    return run


def make_settings(indexes: Path) -> Settings:
    """Returns settings of a small service of index 'test'."""
    return Settings(
        indexes=indexes,
        index="test",
        threads=1,
        watch_seconds=0,
        channel_timeout_ms=10_000,  # a busy machine takes longer than the default of 200
    )


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return make_settings(tmp_path / "indexes")


@pytest.fixture
def client(build_version: Builder, settings: Settings) -> Iterator[TestClient]:
    """The real application with an index of 60 documents and the test encoder."""
    build_version(make_records(60))
    with TestClient(create_app(settings, BigramEncoder()), raise_server_exceptions=False) as client:
        yield client


@pytest.fixture
def indexes(tmp_path: Path) -> Path:
    """The folder that all builds of a test publish in."""
    return tmp_path / "indexes"


@pytest.fixture
def pair_file(tmp_path: Path) -> Path:
    """A pair of test encoders, as a file that a command can name."""
    path = tmp_path / "bigrams.toml"
    write_pair(make_pair(folder=tmp_path), path)
    return path


@pytest.fixture
def test_encoders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the commands use the test encoder where they would load a model."""

    def load(spec: EncoderSpec, folder: Path, threads: int) -> BigramEncoder:
        return BigramEncoder(spec.role, spec.embedding_space)

    monkeypatch.setattr("models.encoders.factory.OnnxEncoder", load)
