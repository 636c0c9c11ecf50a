"""Keys of a running service are replaced by replacing their file."""

import time
from pathlib import Path

import httpx2
import pytest

from core.service_process import running_service
from service.access.api_keys import new_key

pytestmark = pytest.mark.e2e


def test_a_key_is_replaced_without_a_restart(indexes: Path, tmp_path: Path) -> None:
    (old, old_entry), (new, new_entry) = (new_key("app", "search") for _ in range(2))
    path = tmp_path / "keys"
    path.write_text(old_entry)
    with running_service(indexes, "sample", API_KEYS_FILE=str(path)) as service:

        def status(secret: str) -> int:
            headers = {"Authorization": f"Bearer {secret}"}
            return httpx2.get(f"{service.url}/index", headers=headers, timeout=30).status_code

        assert (status(old), status(new)) == (200, 401)
        (tmp_path / "new").write_text("half of a fi")
        (tmp_path / "new").replace(path)
        (tmp_path / "new").write_text(new_entry)
        (tmp_path / "new").replace(path)
        end = time.monotonic() + 60
        while status(new) != 200:
            assert time.monotonic() < end
            time.sleep(0.05)
        assert status(old) == 401
        assert service.process.poll() is None
