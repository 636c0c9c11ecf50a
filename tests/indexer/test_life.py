"""No sequence of commands, kills, full disks and clocks loses an index."""

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests.indexer.commands import Command, Process, execute
from tests.indexer.life import Life

pytestmark = pytest.mark.e2e


@pytest.mark.timeout(900)
class TestLife(Life.TestCase):  # type: ignore[misc,valid-type]
    settings = settings(
        max_examples=30,
        stateful_step_count=10,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


@pytest.fixture
def life() -> Iterator[Life]:
    """An index with three versions, the last of which is active."""
    machine = Life()
    machine.start(None)
    yield machine
    machine.teardown()


# The first and last points of a command: reading `CURRENT`, taking the lock, writing `CURRENT`.
@pytest.mark.parametrize("at", [*range(8), *range(-12, 0)])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Command("prune", 1), Command("rollback")),
        (Command("activate", 0), Command("activate", 1)),
        (Command("rollback"), Command("prune", 0)),
    ],
    ids=lambda command: command.name,
)
def test_two_commands_at_once(life: Life, first: Command, second: Command, at: int) -> None:
    life.two(first, second, at, days=0, dies=False)
    life.the_active_version_is_whole()
    life.versions_are_listed_in_order()


@pytest.mark.parametrize("at", range(1, 6))
def test_a_reader_opens_the_new_version_if_the_old_one_is_deleted(life: Life, at: int) -> None:
    reader = Process(life.folder, Command("load"), pause=at)
    reader.wait()
    previous = execute(life.folder, Command("rollback")).value
    execute(life.folder, Command("prune", 0))
    outcome = reader.end()
    assert outcome.status == 0, outcome
    assert outcome.value in (previous, life.model.active)


def test_the_clock_does_not_change_the_order(life: Life) -> None:
    first = life.model.active
    life.one(Command("update", 0), days=-400)
    life.one(Command("rollback"), days=0)
    assert life.model.active == first
    life.one(Command("update", 1), days=-800)
    newest = life.model.active
    life.one(Command("activate", 0), days=0)
    life.one(Command("prune", 1), days=0)
    assert newest in life.model.versions
