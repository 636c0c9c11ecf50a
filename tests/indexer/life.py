"""The life of an index as a state machine: random commands, clocks, kills and full disks.

Each step runs one command in a process, or two at once, and compares the index with a model. Files
are read here without the functions under test where that is possible.
"""

import atexit
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from core.types import Query
from core.versions import IndexFolder
from indexer.publication import is_live, verify_version
from search.snapshot import Snapshot, load_index
from search.task import SearchTask
from tests.conftest import make_records, write_jsonl
from tests.encoders import BigramEncoder
from tests.indexer.builds import edit_manifest, to_schema_2
from tests.indexer.commands import Command, Process, execute

CORPORA = 3
# In memory: files are flushed to disk hundreds of times in a sequence.
_FOLDER = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
# The errors of a command that another one disturbs.
_RACES = {
    "build": {"locked"},
    "update": {"locked", "base_not_active"},
    "write": {"locked"},
    "merge": {"locked", "base_not_active"},
    "activate": {"locked", "unknown_version"},
    "rollback": {"locked", "no_older_version", "active_changed", "unknown_version"},
    "prune": {"locked"},
    "migrate": {"locked"},
    "load": set(),
}

# Commands that make versions.
_NEW = ("build", "update", "write", "merge")

_numbers = st.integers(0, 9)
_commands = st.builds(Command, st.sampled_from(sorted(_RACES)), _numbers)
_days = st.sampled_from([0, 0, 0, -400, -2, 2, 400])
# A point from the start or from the end, where commands publish.
_points = st.integers(1, 120) | st.integers(-30, -1)
_rooms = st.sampled_from([0, 100, 1000, 4000, 16000])


@dataclass
class Model:
    """What the index should be.

    Attributes:
        versions: Ids of versions in the order of publication.
        parents: For each version, the one that was active when it was published.
        active: The active version.
    """

    versions: list[str]
    parents: dict[str, str | None]
    active: str

    def previous(self) -> str | None:
        """Returns the version to which a rollback goes."""
        before = self.versions[: self.versions.index(self.active)]
        if is_live(self.active):
            return next((one for one in reversed(before) if not is_live(one)), None)
        if (parent := self.parents[self.active]) in self.versions:
            return parent
        return before[-1] if before else None

    def error(self, command: Command) -> str | None:
        """Returns the error that a command ends with."""
        if command.name == "rollback" and not self.previous():
            return "no_older_version"
        if command.name == "activate" and command.argument not in self.versions:
            return "unknown_version"
        return None

    def run(self, command: Command, value: Any) -> bool:
        """Does what a successful command does; returns whether its result is right."""
        match command.name:
            case "build" | "update" | "write" | "merge" if value:
                self.parents[value] = self.active
                self.versions.append(value)
                self.active = value
            case "activate":
                if command.argument not in self.versions:
                    return False
                self.active = command.argument
            case "rollback":
                if value != self.previous():
                    return False
                self.active = value
            case "prune":
                kept = {*self.versions[::-1][: command.argument], self.active}
                if sorted(value) != sorted(set(self.versions) - kept):
                    return False
                self.versions = [version for version in self.versions if version in kept]
            case "load":
                return bool(value == self.active)
        return True


def _chain(versions: Sequence[str]) -> dict[str, str | None]:
    return dict(zip(versions, [None, *versions], strict=False))


class Life(RuleBasedStateMachine):
    """Runs commands on an index with up to three versions at the start."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="life-", dir=_FOLDER))
        self.index = self.folder / "indexes" / "test"
        self.model = Model([], {}, "")
        self.reader: Snapshot | None = None
        self.is_clean = False

    @initialize(edit=st.sampled_from([None, to_schema_2]))
    def start(self, edit: Callable[[dict[str, Any]], Any] | None) -> None:
        shutil.copytree(_template(built=bool(edit)), self.folder, dirs_exist_ok=True)
        versions = _read_lines(self.folder / "order")
        if edit:
            for version in versions:
                edit_manifest(self.index / version, edit)
        self.model = Model(versions, _chain(versions), versions[-1])

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    @rule(command=_commands, days=_days)
    def one(self, command: Command, days: int) -> None:
        """One command, undisturbed, with any clock."""
        command = self.prepared(command, days)
        expected = deepcopy(self.model)
        outcome = execute(self.folder, command)
        if outcome.status == 0:
            assert not expected.error(command), (command, outcome)
            assert expected.run(command, outcome.value), (command, outcome)
        else:
            assert outcome.status == 1, outcome.code
            assert outcome.code == expected.error(command), (command, outcome)
        self.compare(expected)
        self.is_clean = command.name == "prune"

    @rule(command=_commands, at=_points, days=_days)
    def killed(self, command: Command, at: int, days: int) -> None:
        """One command that is killed at a point."""
        command = self.prepared(command, days)
        before = deepcopy(self.model)
        execute(self.folder, command, kill=_point(command, at))
        self.look([command], before)

    @rule(command=_commands, room=_rooms)
    def on_a_full_disk(self, command: Command, room: int) -> None:
        """One command on a disk without space for some of its files."""
        command = replace(self.prepared(command), room=room)
        expected = deepcopy(self.model)
        outcome = execute(self.folder, command)
        if outcome.status == 0:
            assert expected.run(command, outcome.value), (command, outcome)
            self.compare(expected)
        else:
            errors = "input_output", expected.error(command)
            assert outcome.code in errors, (command, outcome)
            self.look([command], expected)

    @rule(first=_commands, second=_commands, at=_points, days=_days, dies=st.booleans())
    def two(self, first: Command, second: Command, at: int, days: int, dies: bool) -> None:
        """A command that pauses, or is killed, while another one runs from start to end."""
        first, second = self.prepared(first, days), self.prepared(second)
        before = deepcopy(self.model)
        point = _point(first, at)
        process = Process(self.folder, first, **{"kill" if dies else "pause": point})
        process.wait()
        outcomes = [execute(self.folder, second)]
        outcomes.insert(0, process.end())
        commands = [first, second]
        for command, outcome in zip(commands, outcomes, strict=True):
            fine = outcome.status in (0, None) or outcome.code in _RACES[command.name]
            assert fine, (command, outcome)
        if None in [outcome.status for outcome in outcomes]:
            self.look(commands, before)
            return
        done = [
            (command, outcome.value)
            for command, outcome in zip(commands, outcomes, strict=True)
            if outcome.status == 0
        ]
        self.compare(*_serial(before, done))

    def prepared(self, command: Command, days: int = 0) -> Command:
        """Returns a command whose argument suits the index."""
        number = command.argument
        match command.name:
            case "build" | "update" | "write":
                argument = number % CORPORA
            case "activate":
                argument = [*self.model.versions, "20200101T000000.000000Z-0"][
                    number % (len(self.model.versions) + 1)
                ]
            case "prune":
                argument = number % 3
            case _:
                argument = None
        self.is_clean = False
        self.reader = load_index(IndexFolder(self.folder / "indexes", "test"), BigramEncoder())
        return replace(command, argument=argument, days=days)

    def compare(self, *expected: Model) -> None:
        """Compares the index with the states that it may have."""
        versions, active = _read(self.index)
        found = [
            model for model in expected if (set(model.versions), model.active) == (versions, active)
        ]
        assert found, (versions, active, expected)
        self.model = found[0]

    def look(self, commands: list[Command], before: Model) -> None:
        """Checks the index after commands that may have ended anywhere, and goes on from it."""
        versions, active = _read(self.index)
        names = {command.name for command in commands}
        if "prune" not in names:
            assert set(before.versions) <= versions
        new = versions - set(before.versions)
        assert len(new) <= len([name for name in names if name in _NEW])
        allowed = {before.active, *new}
        allowed |= {command.argument for command in commands if command.name == "activate"}
        allowed |= {*before.versions} if "rollback" in names else set()
        assert active in allowed
        ordered = [version for version in before.versions if version in versions]
        numbered = sorted(new, key=lambda version: _manifest(self.index / version)["number"])
        parents = {version: _manifest(self.index / version)["parent"] for version in new}
        self.model = Model(ordered + numbered, before.parents | parents, active)

    @invariant()
    def the_active_version_is_whole(self) -> None:
        if not self.model.versions:
            return
        folder = self.index / self.model.active
        verify_version(folder)
        snapshot = load_index(IndexFolder(self.folder / "indexes", "test"), BigramEncoder())
        assert snapshot.manifest.version == self.model.active
        text = next(iter(snapshot.segment.documents))
        vector = BigramEncoder().encode([f"{text.title}\n{text.text}"]).vectors[0]
        nearest = SearchTask(snapshot=snapshot, query=Query("", top_k=1), vector=vector)
        assert nearest.search().hits[0].id == text.id
        if self.reader:  # a service that still has the version of before
            query = Query("", top_k=3)
            SearchTask(snapshot=self.reader, query=query, vector=vector).search()

    @invariant()
    def versions_are_listed_in_order(self) -> None:
        assert IndexFolder(self.folder / "indexes", "test").versions() == self.model.versions
        for version, parent in self.model.parents.items():
            if version in self.model.versions:
                assert parent in (None, _manifest(self.index / version)["parent"])

    @invariant()
    def nothing_is_left_after_a_prune(self) -> None:
        if self.is_clean:
            names = {path.name for path in self.index.iterdir()} - {".lock", ".build.lock"}
            segments = {
                entry["folder"]
                for version in self.model.versions
                for entry in _manifest(self.index / version).get("segments", ())
            }
            assert names == {"CURRENT", *self.model.versions, *segments}
            paths = [*self.index.rglob(".*"), *(self.folder / "builds").rglob(".*")]
            assert [path for path in paths if path.name not in (".lock", ".build.lock")] == []


@cache
def _template(*, built: bool = False) -> Path:
    """Returns a folder with corpora and an index of three versions; the clock was set back.

    The last two have several segments, unless all are `built`.
    """
    folder = Path(tempfile.mkdtemp(prefix="life-template-", dir=_FOLDER))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for number in range(CORPORA):
        write_jsonl(folder / f"corpus-{number}.jsonl", make_records(8 + number)[number:])
    change = "rewrite" if built else "update"
    versions = [
        execute(folder, Command(name, number, days)).value
        for name, number, days in (("build", 0, 0), (change, 1, -1), (change, 2, 1))
    ]
    (folder / "order").write_text("\n".join(versions))
    return folder


@cache
def points_of(name: str) -> int:
    """Returns the number of points of a command on the template."""
    with tempfile.TemporaryDirectory(dir=_FOLDER) as folder:
        shutil.copytree(_template(), folder, dirs_exist_ok=True)
        argument = {"activate": _read_lines(Path(folder, "order"))[0], "prune": 0}.get(name, 0)
        return execute(Path(folder), Command(name, argument)).points


def _point(command: Command, at: int) -> int:
    points = points_of(command.name)
    return max(1, points + 1 + at) if at < 0 else 1 + at % points


def _serial(before: Model, done: list[tuple[Command, Any]]) -> list[Model]:
    """Returns the states to which the commands lead in the orders that explain their results."""
    found = []
    for order in permutations(done):
        model = deepcopy(before)
        if all(model.run(command, value) for command, value in order):
            found.append(model)
    assert found, done
    return found


def _read(index: Path) -> tuple[set[str], str]:
    """Returns the complete versions and the active one."""
    versions = {path.parent.name for path in index.glob("[!.]*/manifest.json")}
    active = (index / "CURRENT").read_text().strip()
    assert active in versions
    return versions, active


def _read_lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def _manifest(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "manifest.json").read_bytes())
    return content
