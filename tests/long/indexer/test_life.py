"""Thousands of sequences of commands on an index, and all pairs of commands at each point."""

import pytest
from hypothesis import HealthCheck, settings

from tests.indexer.commands import Command
from tests.indexer.life import Life, points_of

TestLife = Life.TestCase
TestLife.settings = settings(
    max_examples=2000,
    stateful_step_count=12,
    deadline=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)

COMMANDS = ("build", "update", "activate", "rollback", "prune", "migrate", "load")


@pytest.mark.parametrize("dies", [False, True], ids=["pauses", "dies"])
@pytest.mark.parametrize("second", COMMANDS)
@pytest.mark.parametrize("first", COMMANDS)
def test_two_commands_at_once(first: str, second: str, dies: bool) -> None:
    for at in range(points_of(first)):
        life = Life()
        life.start(None)
        life.two(Command(first, at), Command(second, at + 1), at, days=0, dies=dies)
        life.the_active_version_is_whole()
        life.versions_are_listed_in_order()
        life.one(Command("prune", 1), days=0)
        life.nothing_is_left_after_a_prune()
        life.teardown()
