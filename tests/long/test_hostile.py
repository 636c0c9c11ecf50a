"""Thousands of hostile bodies."""

from collections.abc import Iterator
from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings, target

from tests.e2e.attacks import post, send
from tests.e2e.fuzz import BODIES, check
from tests.e2e.victim import Victim, build_index, victim


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    """A service with default settings."""
    with victim(build_index(tmp_path_factory.mktemp("hostile"), documents=2000)) as service:
        yield service


@settings(max_examples=5000, deadline=None, suppress_health_check=list(HealthCheck))
@given(BODIES)
def test_no_body_stalls_the_event_loop(service: Victim, request_: tuple[str, bytes]) -> None:
    """The search for bodies is directed towards long callbacks."""
    target(check(service, partial(send, request=post(*request_)), hold=1).callback_ms)
