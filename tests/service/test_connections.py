import resource

import pytest

from service.http.connections import available_connections

UNLIMITED = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "hard", "raised", "most", "connections"),
    [
        (1024, 100_000, True, 4096, 4096),
        (1024, UNLIMITED, True, 4096, 4096),
        (UNLIMITED, UNLIMITED, False, 4096, 4096),
        (100_000, 100_000, False, 64, 64),
    ],
)
def test_the_limit_of_open_files_is_raised_for_the_connections(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, raised: bool, most: int, connections: int
) -> None:
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: limits.append(limit))
    assert available_connections(most) == (connections, 2048)
    assert bool(limits) == raised
    assert all(soft < files <= 100_000 and limit == hard for files, limit in limits)


@pytest.mark.parametrize("files", [1, 64, 128, 1024])
def test_a_low_limit_of_open_files_leaves_fewer_connections(
    monkeypatch: pytest.MonkeyPatch, files: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))
    connections, backlog = available_connections(4096)
    assert connections >= 1
    assert backlog >= 1
    assert connections + backlog < max(files, 3)
