"""No sequence of commands, kills, full disks and clocks loses an index."""

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests.indexer.life import Life

pytestmark = pytest.mark.e2e

TestLife = Life.TestCase
TestLife.settings = settings(
    max_examples=50,
    stateful_step_count=10,
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
