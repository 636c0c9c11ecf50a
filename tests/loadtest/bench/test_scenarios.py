"""Scenarios from end to end, with a script in the place of wrk."""

import pytest

from loadtest.bench import scenarios
from loadtest.bench.processes import Options

pytestmark = pytest.mark.e2e


@pytest.mark.usefixtures("wrk")
@pytest.mark.parametrize("scenario", [scenarios.cache, scenarios.redis])
def test_hits_in_a_cache_are_measured_once_they_are_cached(
    scenario: scenarios.Scenario, options: Options
) -> None:
    (figure,) = scenario(options)["figures"]
    assert figure["reached"] == 1.5


@pytest.mark.usefixtures("wrk")
def test_an_idle_service_is_measured_beside_the_bare_loop(options: Options) -> None:
    found = scenarios.idle(options)
    (entry,) = found["rounds"]
    assert found["figures"][0]["reached"] == entry["added_ms"] == 1.5 - entry["bare"]["p50_ms"]
