from pathlib import Path

import pytest

from loadtest.shared_cache import main
from tests.redis_server import run_redis

pytestmark = pytest.mark.e2e


def test_both_caches_are_filled_by_another_process_and_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["--entries", "64", "--places", "1024", "--lookups", "200"]
    with run_redis(tmp_path) as redis:
        assert main(["--redis-url", redis.url, *few]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "shared table",
        "Redis, 1 at once",
        "Redis, 16 at once",
    ]
    assert all(line.endswith("100.0% hits") for line in lines)
