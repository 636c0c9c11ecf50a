"""No request and no client stalls the event loop, fills the memory or outlives SIGTERM."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from tests.e2e.attacks import CONNECTIONS, REQUESTS, post, send
from tests.e2e.fuzz import BODIES, check
from tests.e2e.victim import Victim, build_index, victim

pytestmark = pytest.mark.e2e

# How long clients hold connections that do not send or do not read [s].
HOLD = 2.0
CUT_OFF = ("100 clients that do not read", "100 slow heads", "100 slow bodies")


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an index with many values in many fields."""
    return build_index(tmp_path_factory.mktemp("hostile"), documents=1000)


@pytest.fixture(scope="module")
def service(attacked: Path) -> Iterator[Victim]:
    """A service with default settings."""
    with victim(attacked) as service:
        yield service


@pytest.mark.parametrize("name", [name for name in REQUESTS if "1,024" not in name])
def test_no_request_stalls_the_event_loop(service: Victim, name: str) -> None:
    assert "waiting" not in check(service, REQUESTS[name], HOLD).outcomes


@pytest.mark.parametrize("name", CONNECTIONS)
def test_clients_that_neither_send_nor_read_are_bounded(service: Victim, name: str) -> None:
    check(service, CONNECTIONS[name], HOLD)


@settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(BODIES)
def test_no_body_stalls_the_event_loop(service: Victim, request_: tuple[str, bytes]) -> None:
    check(service, partial(send, request=post(*request_)), HOLD)


def test_clients_that_neither_send_nor_read_are_cut_off(attacked: Path) -> None:
    with victim(attacked, CLIENT_TIMEOUT_SECONDS="0.5", TIMEOUT_MS="1000") as service:
        for name in CUT_OFF:
            assert "waiting" not in check(service, CONNECTIONS[name], hold=4).outcomes, name


def test_requests_with_an_upgrade_are_answered(service: Victim) -> None:
    assert check(service, REQUESTS["Upgrade: h2c"], HOLD).outcomes == {"200": 4}


def test_idle_connections_leave_file_descriptors_for_probes(attacked: Path) -> None:
    with victim(attacked, open_files=128) as service:
        check(service, CONNECTIONS["180 idle connections"], HOLD)
        # On a busy machine some of the 180 come after others have left.
        assert service.server.metric('care_connections_ended_total{reason="limit"}') > 0
