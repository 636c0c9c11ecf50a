"""Builds on a local Ray cluster with two actors, compared with builds without Ray."""

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray

from care.cli.main import main
from core.encoders import Encoder
from core.errors import CareError, PairError, ProviderError
from core.manifest import IndexManifest
from core.shards import complete_shards
from core.text import document_text
from core.versions import IndexFolder, read_manifest
from indexer.build import BuildOptions, build
from indexer.publication import IndexWriter
from indexer.ray_executor import LOCAL, RayExecutor, RemoteEncoder, _init, connected
from indexer.update import Changes, active_manifest, update
from tests.conftest import make_records, write_jsonl
from tests.encoders import BigramEncoder, make_spec
from tests.engines.distributed.encoders import (
    LoggingEncoder,
    Trouble,
    die,
    die_once,
    fail,
    processes_of,
    reject,
    texts_of,
    wait_for_another,
)
from tests.errors import raises
from tests.indexer.builds import BATCH_SIZE, SHARD_SIZE, build_options, only_folder

ROOT = Path(__file__).parents[3]
COUNT = 100
SHARDS = -(-COUNT // SHARD_SIZE)
ACTORS = 2


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """A Ray cluster for all tests of this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        # By default workers run with a lower priority.
        patch.setenv("RAY_worker_niceness", "0")
        with connected(LOCAL, ACTORS):
            yield


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log"
    path.mkdir()
    return path


@pytest.fixture
def work(tmp_path: Path) -> Path:
    path = tmp_path / "work"
    path.mkdir()
    write_jsonl(path / "corpus.jsonl", make_records(COUNT))
    return path


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The index that the local executor builds."""
    folder = tmp_path_factory.mktemp("local")
    write_jsonl(folder / "corpus.jsonl", make_records(COUNT))
    return contents(run(build_options(folder, folder / "corpus.jsonl")))


def run(options: BuildOptions) -> IndexManifest:
    encoder = (
        RemoteEncoder(make_spec("document"))
        if isinstance(options.executor, RayExecutor)
        else BigramEncoder("document")
    )
    return build(options, encoder, BigramEncoder("query"))[0]


def text_of(number: int) -> str:
    record = make_records(COUNT)[number]
    return document_text(record["title"], record["text"])


def ray_options(
    work: Path, log: Path, trouble: Trouble | None = None, at: int = 0, **facts: Any
) -> BuildOptions:
    make = partial(LoggingEncoder, log, trouble, f"第{at}号")
    executor = RayExecutor(make, BATCH_SIZE, actors=ACTORS, **facts)
    return build_options(work, work / "corpus.jsonl", executor=executor)


def contents(manifest: IndexManifest) -> dict[str, Any]:
    """Returns everything that does not depend on the time of the build, with file checksums."""
    when = {"version", "parent", "created_at", "build_seconds", "libraries"}
    return manifest.model_dump(exclude=when)


def test_two_actors_build_the_same_index(work: Path, log: Path, expected: dict[str, Any]) -> None:
    assert contents(run(ray_options(work, log, wait_for_another, at=0))) == expected
    assert len(processes_of(log)) == ACTORS
    assert len(texts_of(log)) == len(set(texts_of(log))) == COUNT


def test_a_killed_actor_does_not_change_the_index(
    work: Path, log: Path, expected: dict[str, Any]
) -> None:
    assert contents(run(ray_options(work, log, die_once, at=50))) == expected
    assert (log / "died").exists()
    # Another actor encoded the shard of the killed one.
    assert texts_of(log).count(text_of(50)) == 2


def test_a_shard_that_crashes_every_actor_stops_the_build(
    work: Path, log: Path, expected: dict[str, Any]
) -> None:
    with raises(CareError, "workers_died", shard=3):
        run(ray_options(work, log, die, at=50))
    assert texts_of(log).count(text_of(50)) == 3
    assert contents(run(ray_options(work, log))) == expected


def test_a_build_with_a_killed_driver_is_resumed_by_either_executor(
    work: Path, log: Path, tmp_path: Path, expected: dict[str, Any]
) -> None:
    command = [sys.executable, "-m", "tests.engines.distributed.killed_ray_build"]
    done = subprocess.run([*command, str(work), str(log), "第70号"], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    wait_for_end(processes_of(log))
    shutil.copytree(work, tmp_path / "copy")

    folder = only_folder(work / "builds" / "test")
    made = {record.shard for record in complete_shards(folder)}
    assert 0 < len(made) < SHARDS
    again = tmp_path / "again"
    again.mkdir()
    assert contents(run(ray_options(work, again))) == expected
    missing = [text_of(i) for i in range(COUNT) if i // SHARD_SIZE not in made]
    assert sorted(texts_of(again)) == sorted(missing)

    copy = tmp_path / "copy"
    assert contents(run(build_options(copy, copy / "corpus.jsonl"))) == expected


def test_a_build_of_the_local_executor_is_resumed(
    work: Path, log: Path, expected: dict[str, Any]
) -> None:
    began = LoggingEncoder(log, fail, "第50号")
    with pytest.raises(RuntimeError):
        build(build_options(work, work / "corpus.jsonl"), began, BigramEncoder("query"))
    for path in log.iterdir():
        path.unlink()
    assert contents(run(ray_options(work, log))) == expected
    assert len(texts_of(log)) == COUNT - 50 // SHARD_SIZE * SHARD_SIZE


def refused_by(options: BuildOptions, encoder: Encoder) -> tuple[dict[str, Any], dict[str, str]]:
    manifest, encoded = build(options, encoder, BigramEncoder("query"))
    assert manifest.count == COUNT - 1
    return contents(manifest), dict(encoded.reasons)


def test_a_failed_text_is_excluded_as_by_the_local_executor(
    work: Path, log: Path, tmp_path: Path
) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(work / "corpus.jsonl", alone)
    local = refused_by(
        build_options(alone, alone / "corpus.jsonl", max_reject_rate=0.1),
        LoggingEncoder(log, reject, "第50号"),
    )
    distributed = refused_by(
        replace(ray_options(work, log, reject, at=50), max_reject_rate=0.1),
        RemoteEncoder(make_spec("document")),
    )
    assert local == distributed
    assert local[1] == {"d0050": "the text is rejected"}


def test_too_many_failed_texts_are_an_error(work: Path, log: Path) -> None:
    options = replace(ray_options(work, log, reject, at=50), max_reject_rate=0.0)
    with raises(CareError, "too_many_failures", id="d0050", allowed=0):
        run(options)


def test_an_encoder_that_fails_is_an_error(work: Path, log: Path) -> None:
    with raises(CareError, "worker_failed"):
        run(ray_options(work, log, fail, at=50))


def missing_encoder() -> BigramEncoder:
    raise PairError("model.onnx is missing")


def test_an_encoder_that_cannot_be_loaded_is_an_error(work: Path) -> None:
    executor = RayExecutor(missing_encoder, BATCH_SIZE, actors=ACTORS)
    with raises(CareError, "bad_pair"):
        run(build_options(work, work / "corpus.jsonl", executor=executor))


class Unreadable(BigramEncoder):
    """Cannot be loaded by an actor, as if the project were not installed there."""

    def __reduce__(self) -> Any:
        return missing_encoder, ()


def given(encoder: BigramEncoder) -> BigramEncoder:
    return encoder


def test_an_actor_that_cannot_start_is_an_error(work: Path) -> None:
    executor = RayExecutor(partial(given, Unreadable()), BATCH_SIZE, actors=ACTORS)
    with raises(ProviderError, "ray_failed"):
        run(build_options(work, work / "corpus.jsonl", executor=executor))


def test_an_update_reuses_vectors_with_the_same_result(
    work: Path, tmp_path: Path, log: Path
) -> None:
    records = make_records(COUNT)
    changed = [record | {"text": f"新：{record['text']}"} for record in records[5:60:11]]
    new = write_jsonl(tmp_path / "new.jsonl", [*changed, *make_records(COUNT + 40)[COUNT:]])
    made = []
    for options in (
        build_options(tmp_path, work / "corpus.jsonl"),
        ray_options(work, log),
    ):
        run(build_options(options.indexes.parent, work / "corpus.jsonl"))
        base = active_manifest(IndexWriter(options.indexes, options.name))
        changes = Changes(str(new))
        encoder = BigramEncoder("document")
        result = update(options, changes, base, encoder, BigramEncoder("query"))
        assert result
        made.append(contents(result[0]))
        del made[-1]["corpus"]["update"]["base"]
    assert made[0] == made[1]
    assert len(texts_of(log)) == 40 + len(changed)


def test_the_command_encodes_with_care_mini_on_a_local_ray_cluster(tmp_path: Path) -> None:
    lines = (ROOT / "data" / "sample" / "corpus.jsonl").read_text("utf-8").splitlines()[:40]
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("\n".join(lines), encoding="utf-8")
    arguments = ["index", str(corpus), "--shard-size", "8", "--threads", "1"]
    arguments += ["--indexes", str(tmp_path / "indexes")]
    on_ray = ["--ray-actors", str(ACTORS)]
    made = []
    for engine in ("local", "ray"):
        command = [*arguments, "--index", engine, "--executor", engine]
        command += ["--builds", str(tmp_path / engine)]
        if engine == "local":
            assert main(command) == 0
        else:
            done = subprocess.run(
                [sys.executable, "-m", "care", *command, *on_ray],
                cwd=ROOT,
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            # Standard output has only the summary.
            words = [line[:7].strip() for line in done.stdout.splitlines()]
            assert words == ["corpus", "encode", "index", "total", "active"], done.stdout
        indexes = tmp_path / "indexes"
        manifest = read_manifest(indexes / engine / IndexFolder(indexes, engine).active())
        made.append(contents(manifest) | {"name": "same"})
    assert made[0] == made[1]


def wait_for_end(processes: set[int]) -> None:
    deadline = time.monotonic() + 60
    while any(is_running(process) for process in processes):
        assert time.monotonic() < deadline, "workers outlive their driver"
        time.sleep(0.1)


def is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.parametrize("failures", [2, 3])
def test_a_node_that_does_not_start_is_retried(
    monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    tries: list[str] = []

    def start(address: str, **_: object) -> None:
        tries.append(address)
        if len(tries) <= failures:
            raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", start)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    if failures == 3:
        with pytest.raises(RuntimeError, match="timed out during startup"):
            _init(LOCAL)
    else:
        _init(LOCAL)
    assert tries == [LOCAL] * 3
