"""Concurrent requests to the real service are answered as if one followed the other."""

import pytest

from tests.e2e.histories import run

pytestmark = pytest.mark.e2e


def test_no_history_contradicts_an_order_while_processes_meet_faults() -> None:
    numbers, wrong = run(histories=8, operations=100, seed=1, side_by_side=4, seconds=15)
    assert wrong == []
    assert sum(numbers["kills"].values()) > 1
