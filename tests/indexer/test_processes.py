"""Builds and updates that are killed or run concurrently."""

import random
from pathlib import Path
from typing import Any

import pytest

from core.manifest import IndexManifest
from core.shards import complete_shards
from core.versions import IndexFolder
from indexer.build import build
from indexer.publication import IndexWriter, verify_version
from indexer.versions import prune
from tests.conftest import make_records, write_jsonl
from tests.encoders import BigramEncoder
from tests.indexer.builds import build_options
from tests.indexer.commands import Command, Process, execute, perform

pytestmark = pytest.mark.e2e

DEATHS = 10
BUILD, UPDATE = Command("build", 0), Command("update", 1)


def prepare(folder: Path, command: Command) -> Path:
    """Writes the input of a command; the input of an update includes an index."""
    folder.mkdir()
    records = make_records(100)
    write_jsonl(folder / "corpus-0.jsonl", records[:60])
    changed = [record | {"text": f"新：{record['text']}"} for record in records[5:60:11]]
    write_jsonl(folder / "corpus-1.jsonl", [*changed, *records[60:]])
    (folder / "ids.txt").write_text("d0000\nd0033\n")
    if command == UPDATE:
        perform(folder, BUILD)
    return folder


def active(folder: Path) -> IndexManifest:
    version = IndexFolder(folder / "indexes", "test").active()
    return verify_version(IndexFolder(folder / "indexes", "test").path / version)


def contents(manifest: IndexManifest) -> dict[str, Any]:
    """Returns everything that does not depend on the time of the build.

    A command that is killed between the publication and the activation of a version leaves that
    one, and the version of the next command has a larger number.
    """
    when = {"version", "parent", "number", "created_at", "build_seconds", "libraries"}
    facts = manifest.model_dump(exclude=when)
    if facts["corpus"]["update"]:
        del facts["corpus"]["update"]["base"]
    return facts


@pytest.fixture(scope="module", params=[BUILD, UPDATE], ids=["build", "update"])
def command(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(scope="module")
def undisturbed(
    command: Command, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], int]:
    """Returns the result of an uninterrupted command, and the number of points to kill it at."""
    folder = prepare(tmp_path_factory.mktemp("undisturbed") / "work", command)
    points = execute(folder, command).points
    return contents(active(folder)), points


@pytest.mark.parametrize("death", range(DEATHS))
def test_a_command_killed_at_any_point_is_resumed_with_the_same_result(
    tmp_path: Path, command: Command, undisturbed: tuple[dict[str, Any], int], death: int
) -> None:
    expected, points = undisturbed
    point = random.Random(2026).sample(range(1, points + 1), DEATHS)[death]
    folder = prepare(tmp_path / "work", command)
    before = IndexFolder(folder / "indexes", "test").versions()
    assert execute(folder, command, kill=point).status is None

    # The active version is the old one or a complete new one.
    if before or (folder / "indexes" / "test" / "CURRENT").exists():
        manifest = active(folder)
        assert [manifest.version] == before or contents(manifest) == expected
    builds = list((folder / "builds" / "test").glob("*/"))
    complete = sum(shard.rows for build in builds for shard in complete_shards(build))
    if command == BUILD:
        options = build_options(folder, folder / "corpus-0.jsonl")
        _, encoded = build(options, BigramEncoder("document"), BigramEncoder("query"))
        assert encoded.summary.resumed_texts == complete
    else:
        perform(folder, command)
    assert contents(active(folder)) == expected
    prune(IndexWriter(folder / "indexes", "test"), folder / "builds", keep=1)
    kept = {path.name for path in (folder / "indexes" / "test").iterdir()}
    assert kept == {
        "CURRENT",
        ".lock",
        ".build.lock",
        IndexFolder(folder / "indexes", "test").active(),
    }


@pytest.mark.parametrize("second", [Command("build", 2), Command("update", 3)])
def test_a_second_concurrent_command_on_one_index_is_an_error(
    tmp_path: Path, command: Command, undisturbed: tuple[dict[str, Any], int], second: Command
) -> None:
    _, points = undisturbed
    folder = prepare(tmp_path / "work", UPDATE)
    for number, records in (
        (0, make_records(50)),
        (2, make_records(31)),
        (3, make_records(99)[60:]),
    ):
        write_jsonl(folder / f"corpus-{number}.jsonl", records)
    first = IndexFolder(folder / "indexes", "test").versions()
    running = Process(folder, command, pause=points // 2)
    running.wait()
    assert execute(folder, second).code == "locked"
    assert running.end().status == 0
    versions = IndexFolder(folder / "indexes", "test").versions()
    assert len(versions) == len(first) + 1
    assert active(folder).version == versions[-1]
    assert execute(folder, second).status == 0
