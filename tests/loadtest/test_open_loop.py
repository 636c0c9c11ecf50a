import json
from pathlib import Path

import pytest

from loadtest import measurement
from loadtest.open_loop import main
from tests.loadtest.known_service import KnownService, served

QUICK = ["--seconds", "0.5", "--warm-up", "0.1", "--pause", "0"]


def test_rates_are_measured_and_drawn(
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
    assert (tmp_path / "open_loop.png").read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "200:50" in out
    assert "secret-key" not in text + out
    # Warm-up, then the two measurements.
    assert len(service.bodies) == 5 + 25 + 50


def test_fresh_questions_alone_never_repeat(tmp_path: Path) -> None:
    service = KnownService()
    fresh = ["--repeated", "0", "--batches", "0", "--filtered", "1"]
    with served(service) as url:
        assert main(["--url", url, "--rates", "200", "--out", str(tmp_path), *fresh, *QUICK]) == 0
    texts = [body["query"] for body in service.bodies]
    assert len(set(texts)) == len(texts) == 120
    assert {body["filter"]["department"][0] for body in service.bodies} == {"儿科", "骨科"}


@pytest.fixture
def any_lag(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the driver be held up by what else runs on the machine."""
    monkeypatch.setattr(measurement, "_LATE_MS", 10_000.0)


@pytest.mark.usefixtures("any_lag")
def test_find_max_fails_where_nothing_is_sustained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with served(KnownService(statuses=(503,))) as url:
        assert main(["--url", url, "--find-max", "--out", str(tmp_path), *QUICK]) == 1
    result = json.loads((tmp_path / "open_loop.json").read_text(encoding="utf-8"))
    assert result["find_max"]["rate"] is None
    assert result["find_max"]["limited_by"] == "service"
    assert [m["statuses"] for m in result["measurements"]] == [{"503": 5}, {"503": 5}]
    assert "Not even the lowest rate" in capsys.readouterr().out


@pytest.mark.usefixtures("any_lag")
def test_find_max_ends_at_the_grid(tmp_path: Path) -> None:
    grid = ["--lowest", "20", "--highest", "40", "--step", "2", "--bound-ms", "5000"]
    with served(KnownService()) as url:
        assert main(["--url", url, "--find-max", "--out", str(tmp_path), *grid, *QUICK]) == 0
    result = json.loads((tmp_path / "open_loop.json").read_text(encoding="utf-8"))
    assert [m["rate"] for m in result["measurements"]] == [20, 40]
    assert result["find_max"]["rate"] == 40
    assert result["find_max"]["limited_by"] == "grid"
    assert result["find_max"]["bound_ms"] == 5000


@pytest.mark.parametrize(("key", "problem"), [("wanted", "answered with 401"), ("", "not answer")])
def test_a_service_that_cannot_be_asked(
    key: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with served(KnownService(key=key)) as url:
        address = url if key else "http://127.0.0.1:9"
        assert main(["--url", address, "--rates", "10", "--out", str(tmp_path)]) == 2
    assert problem in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("rates", ["0", "-5", "ten", "10,,20", "nan"])
def test_rates_must_be_numbers_above_zero(rates: str) -> None:
    with pytest.raises(SystemExit):
        main(["--url", "http://127.0.0.1:9", f"--rates={rates}"])
