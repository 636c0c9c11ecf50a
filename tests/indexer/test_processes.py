"""Builds and updates that are killed or run concurrently."""

import random
from pathlib import Path
from typing import Any

import pytest

from core.errors import CareError
from core.manifest import IndexManifest
from core.shards import complete_shards
from core.versions import IndexFolder
from indexer.publication import IndexWriter, verify_version
from indexer.versions import prune
from tests.conftest import make_records, write_jsonl
from tests.encoders import BigramEncoder
from tests.errors import raises
from tests.indexer.processes import (
    Job,
    PausedJob,
    build_corpus,
    count_points,
    kill_at,
    update_index,
)

pytestmark = pytest.mark.e2e

DEATHS = 10


def prepare(folder: Path, job: Job) -> Path:
    """Writes the input of a job; the input of an update includes an index."""
    folder.mkdir()
    records = make_records(100)
    write_jsonl(folder / "corpus.jsonl", records[:60])
    changed = [record | {"text": f"新：{record['text']}"} for record in records[5:60:11]]
    write_jsonl(folder / "new.jsonl", [*changed, *records[60:]])
    (folder / "ids.txt").write_text("d0000\nd0033\n")
    if job is update_index:
        build_corpus(folder, BigramEncoder("document"))
    return folder


def active(folder: Path) -> IndexManifest:
    version = IndexFolder(folder / "indexes", "test").active()
    return verify_version(IndexFolder(folder / "indexes", "test").path / version)


def contents(manifest: IndexManifest) -> dict[str, Any]:
    """Returns everything that does not depend on the time of the build.

    A job that is killed between the publication and the activation of a version leaves that one,
    and the version of the next job has a larger number.
    """
    when = {"version", "parent", "number", "created_at", "build_seconds", "libraries"}
    facts = manifest.model_dump(exclude=when)
    if facts["corpus"]["update"]:
        del facts["corpus"]["update"]["base"]
    return facts


@pytest.fixture(scope="module", params=[build_corpus, update_index], ids=["build", "update"])
def job(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(scope="module")
def undisturbed(job: Job, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], int]:
    """Returns the result of an uninterrupted job, and the number of points to kill it at."""
    folder = prepare(tmp_path_factory.mktemp("undisturbed") / "work", job)
    points = count_points(job, folder)
    return contents(active(folder)), points


@pytest.mark.parametrize("death", range(DEATHS))
def test_a_job_killed_at_any_point_is_resumed_with_the_same_result(
    tmp_path: Path, job: Job, undisturbed: tuple[dict[str, Any], int], death: int
) -> None:
    expected, points = undisturbed
    point = random.Random(2026).sample(range(1, points + 1), DEATHS)[death]
    folder = prepare(tmp_path / "work", job)
    before = IndexFolder(folder / "indexes", "test").versions()
    kill_at(job, folder, point)

    # The active version is the old one or a complete new one.
    if before or (folder / "indexes" / "test" / "CURRENT").exists():
        manifest = active(folder)
        assert [manifest.version] == before or contents(manifest) == expected
    builds = list((folder / "builds" / "test").glob("*/"))
    complete = sum(shard.rows for build in builds for shard in complete_shards(build))
    resumed = job(folder, BigramEncoder("document"))
    assert job is update_index or resumed == complete
    assert contents(active(folder)) == expected
    prune(IndexWriter(folder / "indexes", "test"), folder / "builds", keep=1)
    kept = {path.name for path in (folder / "indexes" / "test").iterdir()}
    assert kept == {
        "CURRENT",
        ".lock",
        ".build.lock",
        IndexFolder(folder / "indexes", "test").active(),
    }


@pytest.mark.parametrize("second", [build_corpus, update_index])
def test_a_second_concurrent_job_on_one_index_is_an_error(
    tmp_path: Path, job: Job, second: Job
) -> None:
    folder = prepare(tmp_path / "work", update_index)
    write_jsonl(folder / "corpus.jsonl", make_records(30))
    first = IndexFolder(folder / "indexes", "test").versions()
    with PausedJob(job, folder):
        # The two jobs have different corpora.
        write_jsonl(folder / "corpus.jsonl", make_records(31))
        write_jsonl(folder / "new.jsonl", make_records(99)[60:])
        encoder = BigramEncoder("document")
        with raises(CareError, "locked"):
            second(folder, encoder)
        assert encoder.texts_seen == 0
    versions = IndexFolder(folder / "indexes", "test").versions()
    assert len(versions) == len(first) + 1
    assert active(folder).version == versions[-1]
    second(folder, BigramEncoder("document"))
