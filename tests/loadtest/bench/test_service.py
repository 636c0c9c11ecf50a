"""Scenarios of the service, with a few requests in place of wrk."""

from collections.abc import Sequence
from urllib.request import Request, urlopen

import pytest

from loadtest.bench import service
from loadtest.bench.results import ServiceOptions

pytestmark = pytest.mark.e2e


@pytest.fixture(autouse=True)
def few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    def send(url: str, requests: Sequence[str], clients: int, seconds: int) -> dict[str, float]:
        for body in requests[:3]:
            headers = {"Content-Type": "application/json"}
            with urlopen(Request(f"{url}/search", body.encode(), headers)):
                pass
        return {"qps": 100.0, "p50_ms": 1.5, "seconds": 1.0}

    monkeypatch.setattr(service, "drive", send)


def test_the_modes_are_measured_alone_and_at_full_load(options: ServiceOptions) -> None:
    found = service.modes(options)
    assert found["figures"][0]["reached"] == 0.0
    measured = {name for name, value in found["medians"].items() if value > 0}
    assert measured == {
        f"{m}_{v}" for m in ("dense", "hybrid", "lexical") for v in ("qps", "p50_ms")
    }


def test_goodput_at_three_times_the_capacity_is_measured(options: ServiceOptions) -> None:
    found = service.overload(options)
    goodput, latency, memory = (figure["reached"] for figure in found["figures"])
    (entry,) = found["rounds"]
    assert goodput == entry["goodput_qps"] / 100.0
    assert entry["overload"]["sent"] == 300
    assert entry["overload"]["rate"] == 300.0
    assert 0.5 < memory < 2
    assert latency == entry["latency_ratio"]
