import pytest

from core.loopback import is_local, is_loopback

LOOPBACK = [
    *("127.0.0.1", "127.9.8.7", "127.1", "2130706433", "0x7f.1", "::1", "::ffff:127.0.0.1"),
    *("localhost", "LOCALHOST", "localhost.", "care.localhost"),
]
OTHER = [
    *("10.0.0.1", "fe80::1", "::ffff:10.0.0.1", "example.com", "localhost.example.com"),
    *("127.0.0.1.example.com", "notlocalhost", ""),
]
ANY = ["0.0.0.0", "::"]


def url(host: str) -> str:
    return f"http://user:pass@{f'[{host}]' if ':' in host else host}:8000/v1"


def test_hosts_that_only_this_machine_reaches() -> None:
    assert all(map(is_loopback, LOOPBACK))
    assert not any(map(is_loopback, [*OTHER, *ANY]))


@pytest.mark.parametrize("host", [*LOOPBACK, *ANY])
def test_addresses_of_this_machine(host: str) -> None:
    assert is_local(url(host))


@pytest.mark.parametrize(
    "address", [*map(url, OTHER), "http://127.0.0.1@example.com", "http://[", "", "localhost"]
)
def test_other_addresses(address: str) -> None:
    assert not is_local(address)
