"""Complete scenarios, with a script that replaces wrk."""

from collections.abc import Sequence
from urllib.request import Request, urlopen

import pytest

from loadtest.bench import scenarios
from loadtest.bench.options import ServiceOptions

pytestmark = pytest.mark.e2e


@pytest.mark.usefixtures("wrk")
def test_cache_hits_are_measured_beside_a_plain_application(options: ServiceOptions) -> None:
    found = scenarios.cache(options)
    assert [figure["reached"] for figure in found["figures"]] == [1.0, 1.0]
    assert [entry["clients"] for entry in found["rounds"]] == [1, 32]


@pytest.mark.usefixtures("wrk")
def test_hits_in_redis_are_measured_after_they_are_cached(options: ServiceOptions) -> None:
    (figure,) = scenarios.redis(options)["figures"]
    assert figure["reached"] == 1.5


@pytest.mark.usefixtures("wrk")
def test_an_idle_service_is_measured_beside_the_bare_loop(options: ServiceOptions) -> None:
    found = scenarios.idle(options)
    (entry,) = found["rounds"]
    assert found["figures"][0]["reached"] == entry["added_ms"] == 1.5 - entry["bare"]["p50_ms"]


def test_the_modes_are_measured_alone_and_at_full_load(
    options: ServiceOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    def send(url: str, requests: Sequence[str], clients: int, seconds: int) -> dict[str, float]:
        for body in requests:
            headers = {"Content-Type": "application/json"}
            with urlopen(Request(f"{url}/search", body.encode(), headers)):
                pass
        return {"qps": 100.0, "p50_ms": 1.5}

    monkeypatch.setattr(scenarios, "drive", send)
    found = scenarios.modes(options)
    assert found["figures"][0]["reached"] == 0.0
    measured = {name for name, value in found["medians"].items() if value > 0}
    assert measured == {
        f"{m}_{v}" for m in ("dense", "hybrid", "lexical") for v in ("qps", "p50_ms")
    }
    assert found["stages"].keys() == {"dense", "hybrid", "lexical"}
    for loads in found["stages"].values():
        assert loads.keys() == {1, options.connections}
        for mean in loads.values():
            assert mean["request"] == pytest.approx(mean["total"] + mean["other"])
            assert 0 <= mean["search"] < mean["total"] < mean["request"]
    assert found["stages"]["lexical"][1]["encode"] == 0 < found["stages"]["dense"][1]["encode"]
