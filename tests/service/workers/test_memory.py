"""What processes share: here each is a mapping of its own of one file."""

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context

import pytest
from prometheus_client import values
from prometheus_client.parser import text_string_to_metric_families

from core.manifest import IndexManifest
from service.access.rate_limit import RateLimiter
from service.observe.metrics import Metrics
from service.workers.memory import SharedMemory

WORKERS = 2
ROUTE = "/search"


@pytest.fixture(autouse=True)
def own_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library makes its values by one class for the whole process."""
    monkeypatch.setattr(values, "ValueClass", values.ValueClass)


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    """The memory of a supervisor."""
    memory = SharedMemory.create(WORKERS)
    yield memory
    os.close(memory.file)


def worker(memory: SharedMemory, number: int) -> SharedMemory:
    return SharedMemory(memory.file, WORKERS, number)


def page(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            key = sample.name, tuple(sorted(sample.labels.items()))
            assert key not in found
            found[key] = sample.value
    return found


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return page(metrics)[name, tuple(sorted(labels.items()))]


def count(metrics: Metrics, times: int, seconds: float = 0.003) -> None:
    for _ in range(times):
        metrics.answered(ROUTE, "200", seconds)


def test_the_page_of_each_process_is_that_of_all(memory: SharedMemory) -> None:
    supervisor = memory.metrics()
    one, other = (worker(memory, i).metrics() for i in range(WORKERS))
    count(one, 3)
    count(other, 4, seconds=0.1)
    one.queue_tokens.set(5)
    other.queue_tokens.set(7)
    other.redis_breaker.set(2)
    supervisor.workers.set(2)
    supervisor.reloads.labels("success").inc()
    other.answered(ROUTE, "418", 10.0)  # a status that the others have not seen
    for metrics in (supervisor, one, other):
        assert value(metrics, "care_http_requests_total", route=ROUTE, status="200") == 7
        assert value(metrics, "care_http_requests_total", route=ROUTE, status="418") == 1
        assert value(metrics, "care_queue_tokens") == 12
        assert value(metrics, "care_redis_breaker_state") == 2
        assert value(metrics, "care_workers") == 2
        assert value(metrics, "care_index_reloads_total", result="success") == 1
        seconds = "care_http_request_seconds"
        buckets = {
            labels[0][1]: amount
            for (name, labels), amount in page(metrics).items()
            if name == f"{seconds}_bucket" and ("route", ROUTE) in labels
        }
        assert (buckets["0.002"], buckets["0.004"], buckets["0.128"]) == (0, 3, 7)
        assert buckets["+Inf"] == value(metrics, f"{seconds}_count", route=ROUTE) == 8
        assert value(metrics, f"{seconds}_sum", route=ROUTE) == pytest.approx(10.409)


def test_the_page_has_the_series_of_one_process(memory: SharedMemory) -> None:
    alone, shared = Metrics(), worker(memory, 0)
    shared.start()
    assert {name for name, _ in page(alone)} == {name for name, _ in page(shared.metrics())}


def test_a_new_worker_goes_on_counting_where_the_last_one_ended(memory: SharedMemory) -> None:
    supervisor, other = memory.metrics(), worker(memory, 1).metrics()
    first = worker(memory, 0)
    metrics = first.metrics()
    count(metrics, 3)
    count(other, 2)
    metrics.queue_tokens.set(5)
    first.usages.connections.add(9)
    first.beat()
    memory.forget(0)
    assert memory.usages.connections.total == memory.silence(0) == 0
    assert value(supervisor, "care_queue_tokens") == 0
    assert value(supervisor, "care_http_requests_total", route=ROUTE, status="200") == 5
    count(worker(memory, 0).metrics(), 1)
    assert value(supervisor, "care_http_requests_total", route=ROUTE, status="200") == 6


def test_of_versions_only_the_served_one_is_shown(
    memory: SharedMemory, manifest: IndexManifest
) -> None:
    metrics = worker(memory, 0).metrics()
    for version in ("1", "2"):
        metrics.show_index(manifest.model_copy(update={"version": version}), "pair")
    shown = [dict(of)["version"] for name, of in page(metrics) if name == "care_index_info"]
    assert shown == ["2"]


def test_counts_of_threads_and_series_that_begin_meanwhile_are_complete(
    memory: SharedMemory,
) -> None:
    metrics, reader = worker(memory, 0).metrics(), memory.metrics()

    def work(thread: int) -> None:
        for i in range(300):
            metrics.answered(f"/{thread}/{i % 30}", "200", 0.001)
            if i % 100 == 0:
                page(reader)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    found = page(reader)
    counted = [n for (name, of), n in found.items() if name == "care_http_requests_total"]
    assert sum(counted) == 1200


def test_processes_are_summed(memory: SharedMemory) -> None:
    metrics = memory.metrics()
    memory.start()
    fill = "held = b'x' * (1 << 28); print(flush=True); input()"
    command = [sys.executable, "-c", fill]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()
        memory._processes[0] = process.pid
        both = value(metrics, "process_resident_memory_bytes")
        memory.forget(0)
        alone = value(metrics, "process_resident_memory_bytes")
        process.communicate(b"\n")
    assert both > alone + (1 << 27) > (1 << 27)


def _spend(file: int, number: int, rounds: int) -> int:
    import asyncio

    limiter = RateLimiter(0.001, 500, None, buckets=SharedMemory(file, WORKERS, number).buckets)

    async def spend() -> int:
        waits = [await limiter.admit("key", 1) for _ in range(rounds)]
        return waits.count(0)

    return asyncio.run(spend())


def test_workers_share_the_rates_of_keys(memory: SharedMemory) -> None:
    """Two processes at once admit exactly what one would."""
    context = get_context("fork")
    with context.Pool(WORKERS) as pool:
        started = [pool.apply_async(_spend, (memory.file, i, 400)) for i in range(WORKERS)]
        admitted = [each.get(60) for each in started]
    assert sum(admitted) == 500
    assert min(admitted) > 0


def test_names_of_keys_do_not_share_a_bucket(memory: SharedMemory) -> None:
    one, other = (worker(memory, i).buckets for i in range(WORKERS))
    names = [f"key {i}" for i in range(2000)]
    for i, name in enumerate(names):
        one.put(name, i + 1)
    assert [other.get(name) for name in names] == list(range(1, 2001))
    assert other.get("new") == 0


def test_usage_of_all_is_seen_by_all(memory: SharedMemory) -> None:
    one, other = (worker(memory, i).usages for i in range(WORKERS))
    one.queue_tokens.add(3)
    other.queue_tokens.add(4)
    other.requests.add(1)
    assert (one.queue_tokens.own, other.queue_tokens.own) == (3, 4)
    assert one.queue_tokens.total == other.queue_tokens.total == 7
    assert (one.requests.total, one.connections.total) == (1, 0)
