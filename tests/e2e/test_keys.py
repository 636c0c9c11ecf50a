"""Keys of a running service are replaced by replacing their file."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest

from core.service_process import running_service
from service.access.api_keys import new_key
from tests.e2e.services import wait_until

pytestmark = pytest.mark.e2e


def test_no_request_fails_while_a_key_is_rotated(indexes: Path, tmp_path: Path) -> None:
    """The steps of docs/operate/keys.md, beside a client that sends requests all the time."""
    (old, old_entry), (new, new_entry) = (new_key(name, "search") for name in ("one", "two"))
    path = tmp_path / "keys"

    def write(*entries: str) -> None:
        (tmp_path / "new").write_text("".join(f"{entry}\n" for entry in entries))
        (tmp_path / "new").replace(path)

    write(old_entry)
    secret, statuses, over = [old], Counter[int](), threading.Event()
    with running_service(indexes, "sample", API_KEYS_FILE=str(path), WORKERS="2") as service:

        def status(secret: str) -> int:
            headers = {"Authorization": f"Bearer {secret}"}
            url = f"{service.url}/index"
            # Certificates, which no request needs, take 40 ms to load.
            return httpx2.get(url, headers=headers, timeout=30, verify=False).status_code

        def ask() -> None:
            while not over.is_set():
                statuses[status(secret[0])] += 1

        def wait_for(secret: str, wanted: int, in_a_row: int = 40) -> None:
            """Each connection may have another worker, so one answer does not suffice."""
            wait_until(lambda: all(status(secret) == wanted for _ in range(in_a_row)))

        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(ask)
            try:
                write(old_entry, new_entry)
                wait_for(new, 200)
                secret[0] = new
                sent = sum(statuses.values())
                # The last request with the old key has ended.
                wait_until(lambda: sum(statuses.values()) >= sent + 2)
                write(new_entry)
                wait_for(old, 401)
            finally:
                over.set()
            asking.result()
        assert statuses.keys() == {200}
        assert status(new) == 200
        # Each of the two files is read by both workers, and counted once.
        counted = 'care_api_key_reloads_total{result="success"} 2.0\n'
        wait_until(lambda: counted in httpx2.get(f"{service.url}/metrics", verify=False).text)
