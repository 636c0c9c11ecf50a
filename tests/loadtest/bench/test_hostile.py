"""Options of the attacks on a service; the attacks themselves run in tests/e2e/test_hostile.py."""

from pathlib import Path

from core.errors import CareError
from loadtest.bench.hostile import run
from loadtest.bench.options import HostileOptions
from tests.errors import raises


def test_an_unknown_attack_is_an_error(tmp_path: Path) -> None:
    with raises(CareError, "unknown_scenario", scenarios=["earthquake"]):
        run(HostileOptions(out=tmp_path, cache=tmp_path, only=["idle", "earthquake"]))
