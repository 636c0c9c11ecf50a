"""The highest rate that is sustained, and the command `python -m loadtest.open_loop`."""

import json
from pathlib import Path

import pytest

from loadtest import measurement
from loadtest.measurement import Measurement
from loadtest.open_loop import Capacity, find_max, main, rate_grid
from tests.errors import error_code
from tests.loadtest.known_service import KnownService, served

pytestmark = pytest.mark.e2e

RATES = rate_grid(10, 1000, 1.1)
QUICK = ["--seconds", "0.5", "--warm-up", "0.1", "--pause", "0"]


class Service:
    """A simulated service with a capacity, and a load generator with a maximum rate."""

    def __init__(self, capacity: float, driver: float = float("inf"), hiccup: int = -1) -> None:
        self.capacity = capacity
        self.driver = driver
        self.hiccup = hiccup
        self.rates: list[float] = []

    def measure(self, rate: float) -> Measurement:
        slow = rate > self.capacity or len(self.rates) == self.hiccup
        self.rates.append(rate)
        lag = 50.0 if rate > self.driver else 0.5
        latency = {"p50": 5.0, "p90": 9.0, "p99": 400.0 if slow else 20.0, "max": 400.0}
        return Measurement(rate, 1, 100, {"200": 100}, latency, {"p99": lag}, 0, 0.1)

    def find(self, attempts: int = 2) -> Capacity:
        return find_max(self.measure, RATES, 100, 0.001, attempts)


def test_the_rate_grid_is_geometric_and_includes_both_ends() -> None:
    assert rate_grid(10, 80, 2) == [10, 20, 40, 80]
    assert RATES[0] == 10
    assert RATES[-1] <= 1000 < RATES[-1] * 1.1 + 0.1


@pytest.mark.parametrize("capacity", [10, 11.5, 19, 20.5, 137, 500, 940])
def test_the_highest_sustained_step_is_found(capacity: float) -> None:
    service = Service(capacity)
    expected = max(rate for rate in RATES if rate <= capacity)
    assert service.find() == Capacity(expected, "service")
    assert max(service.rates) < 2.3 * max(capacity, 10)
    assert len(set(service.rates)) <= 7 + 4


@pytest.mark.parametrize(
    ("service", "expected"),
    [
        (Service(5), Capacity(None, "service")),
        (Service(1e6), Capacity(RATES[-1], "grid")),
        (Service(1e6, driver=100), Capacity(max(r for r in RATES if r <= 100), "driver")),
    ],
    ids=["below the lowest rate", "above the highest rate", "above the load generator's"],
)
def test_what_limits_the_capacity_is_said(service: Service, expected: Capacity) -> None:
    assert service.find() == expected
    assert expected.rate or service.rates == [10, 10]


def test_one_failed_measurement_is_not_the_limit() -> None:
    assert Service(137, hiccup=1).find() == Service(137).find()
    assert Service(137, hiccup=1).find(attempts=1) != Service(137).find()


def test_rejected_requests_are_not_capacity() -> None:
    def refuse(rate: float) -> Measurement:
        statuses = {"200": 90, "429": 10} if rate > 50 else {"200": 100}
        quick = {"p50": 1.0, "p90": 1.0, "p99": 1.0, "max": 1.0}
        return Measurement(rate, 1, 100, statuses, quick, {"p99": 0.5}, 0, 0.1)

    found = find_max(refuse, RATES, 100, 0.001)
    assert found == Capacity(max(rate for rate in RATES if rate <= 50), "service")


def test_rates_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CARE_LOAD_KEY", "secret-key")
    service = KnownService(key="secret-key")
    with served(service) as url:
        arguments = ["--url", url, "--rates", "50,100", "--seed", "7", "--out", str(tmp_path)]
        assert main([*arguments, *QUICK]) == 0
    text = (tmp_path / "open_loop.json").read_text(encoding="utf-8")
    result = json.loads(text)
    assert [m["rate"] for m in result["measurements"]] == [50, 100]
    assert [m["statuses"] for m in result["measurements"]] == [{"200": 25}, {"200": 50}]
    assert result["seed"] == 7
    assert result["index"] == {"name": "known", "version": "1"}
    assert len(result["queries"]["sha256"]) == 64
    out = capsys.readouterr().out
    assert "secret-key" not in text + out
    # Warm-up and two measurements.
    assert len(service.bodies) == 5 + 25 + 50


def test_new_questions_are_never_repeated(tmp_path: Path) -> None:
    service = KnownService()
    fresh = ["--repeated", "0", "--batches", "0", "--filtered", "1"]
    with served(service) as url:
        assert main(["--url", url, "--rates", "200", "--out", str(tmp_path), *fresh, *QUICK]) == 0
    texts = [body["query"] for body in service.bodies]
    assert len(set(texts)) == len(texts) == 120
    assert {body["filter"]["department"][0] for body in service.bodies} == {"儿科", "骨科"}


@pytest.fixture
def any_lag(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepts any lag of the load generator, because other processes use the machine."""
    monkeypatch.setattr(measurement, "_LATE_MS", 10_000.0)


@pytest.mark.usefixtures("any_lag")
def test_find_max_fails_if_no_rate_is_sustained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with served(KnownService(statuses=(503,))) as url:
        assert main(["--url", url, "--find-max", "--out", str(tmp_path), *QUICK]) == 1
    result = json.loads((tmp_path / "open_loop.json").read_text(encoding="utf-8"))
    assert result["find_max"]["rate"] is None
    assert result["find_max"]["limited_by"] == "service"
    assert [m["statuses"] for m in result["measurements"]] == [{"503": 5}, {"503": 5}]
    assert error_code(capsys.readouterr().err) == "no_capacity"


@pytest.mark.usefixtures("any_lag")
def test_find_max_stops_at_the_highest_rate(tmp_path: Path) -> None:
    grid = ["--lowest", "20", "--highest", "40", "--step", "2", "--bound-ms", "5000"]
    with served(KnownService()) as url:
        assert main(["--url", url, "--find-max", "--out", str(tmp_path), *grid, *QUICK]) == 0
    result = json.loads((tmp_path / "open_loop.json").read_text(encoding="utf-8"))
    assert [m["rate"] for m in result["measurements"]] == [20, 40]
    assert result["find_max"]["rate"] == 40
    assert result["find_max"]["limited_by"] == "grid"
    assert result["find_max"]["bound_ms"] == 5000


@pytest.mark.parametrize(("key", "code"), [("wanted", "unexpected_status"), ("", "no_answer")])
def test_an_unreachable_service_is_an_error(
    key: str, code: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with served(KnownService(key=key)) as url:
        address = url if key else "http://127.0.0.1:9"
        assert main(["--url", address, "--rates", "10", "--out", str(tmp_path)]) == 1
    assert error_code(capsys.readouterr().err) == code
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("rates", ["0", "-5", "ten", "10,,20", "nan"])
def test_rates_must_be_positive_numbers(rates: str) -> None:
    with pytest.raises(SystemExit):
        main(["--url", "http://127.0.0.1:9", f"--rates={rates}"])
