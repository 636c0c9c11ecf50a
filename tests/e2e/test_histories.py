"""Concurrent requests to the real service are answered as if one followed the other."""

import pytest

from tests.e2e.histories import run

pytestmark = pytest.mark.e2e


def test_no_history_contradicts_an_order_while_processes_are_killed() -> None:
    numbers, wrong = run(
        histories=2, operations=100, seed=1, kills=1, kinds={"writer": 1, "worker": 1}
    )
    assert wrong == []
    assert sum(numbers["kills"].values()) == 2
