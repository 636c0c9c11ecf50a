"""Several workers serve as one service, also when one of them fails."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from threading import Event
from typing import Any
from urllib.parse import urlsplit

import pytest

from care.cli.main import main
from core.service_process import ServerProcess, free_port, start_service
from core.versions import IndexFolder
from service.access.api_keys import new_key
from tests.e2e.services import build_index, wait_until

pytestmark = pytest.mark.e2e

# Loaded by each process of a service: worker 1 fails to open versions while the file `refuse`
# exists, workers end at their start while `die` exists.
FAULTS = """
import os, sys
from pathlib import Path

folder, arguments = Path(__file__).parent, sys.orig_argv
if "service.workers.worker" in arguments:
    number = arguments[arguments.index("service.workers.worker") + 2]
    if (folder / "die").exists():
        os._exit(3)
    from core.errors import IndexVersionError
    from search import snapshot
    from stores import segment

    opened = segment.open_segments

    def open_segments(*given):
        if number == "1" and (folder / "refuse").exists():
            raise IndexVersionError("worker 1 cannot open it", code="refused")
        return opened(*given)

    snapshot.open_segments = open_segments
"""
SEARCHED = 'care_http_requests_total{route="/search",status="200"}'
QUERIES = [f"第{i}个病人咳嗽怎么办" for i in range(8)]


class Service:
    """A service of two workers, and what a test asks and does to it."""

    def __init__(self, process: ServerProcess, log: Path, faults: Path) -> None:
        self.process, self.log, self.faults = process, log, faults
        address = urlsplit(process.url)
        self.host, self.port = address.hostname or "", address.port

    def connect(self) -> HTTPConnection:
        return HTTPConnection(self.host, self.port, timeout=60)

    def ask(self, path: str, body: Any = None, method: str = "", key: str = "") -> tuple[int, Any]:
        connection = self.connect()
        try:
            return ask(connection, path, body, method, key)
        finally:
            connection.close()

    def workers(self) -> list[int]:
        """The process ids of the workers."""
        parent = self.process.process.pid
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        return sorted(map(int, children))

    def metric(self, name: str) -> float:
        lines = self.ask("/metrics")[1].splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name} "))

    def logged(self, code: str) -> list[dict[str, Any]]:
        lines = map(json.loads, self.log.read_text().splitlines())
        return [line for line in lines if line.get("code") == code]

    def wait_for_workers(self, other_than: list[int]) -> None:
        """Waits until two workers serve, all of them new compared to the given ones."""
        wait_until(
            lambda: (
                len(set(self.workers()) - set(other_than)) > 0
                and self.metric("care_workers") == len(self.workers()) == 2
            )
        )


def ask(
    connection: HTTPConnection, path: str, body: Any = None, method: str = "", key: str = ""
) -> tuple[int, Any]:
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    content = None if body is None else json.dumps(body).encode()
    connection.request(method or ("GET" if body is None else "POST"), path, content, headers)
    response = connection.getresponse()
    read = response.read()
    is_json = "json" in response.headers["Content-Type"]
    return response.status, json.loads(read) if is_json else read.decode()


Start = Callable[..., Service]


@pytest.fixture
def start(own_indexes: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts a service of two workers."""
    faults = tmp_path / "faults"
    faults.mkdir()
    (faults / "sitecustomize.py").write_text(FAULTS)
    started: list[ServerProcess] = []

    def start(**settings: str) -> Service:
        log = tmp_path / f"log {len(started)}"
        paths = os.pathsep.join([str(faults), *filter(None, sys.path)])
        environment = os.environ | {"PYTHONPATH": paths}
        # What a process writes on standard error goes to a file.
        code = (
            "import os, sys; from care.cli.main import main;"
            f"os.dup2(os.open({str(log)!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2);"
            "sys.exit(main(['serve']))"
        )
        given = {"WORKERS": "2", "WATCH_SECONDS": "0", **settings}
        process = start_service(own_indexes, "sample", given, environment, launcher=("-c", code))
        started.append(process)
        return Service(process, log, faults)

    yield start
    for process in started:
        process.process.kill()
        process.process.wait()


@contextmanager
def load(service: Service, connections: int) -> Iterator[list[list[tuple[int, str]]]]:
    """Keeps connections searching; yields a list for each: status and version of each answer.

    A connection that breaks has the status 0, and the next one takes its place.
    """
    answers: list[list[tuple[int, str]]] = [[] for _ in range(connections)]
    end = Event()

    def search(number: int) -> None:
        connection = service.connect()
        mine = answers[number]
        while not end.is_set():
            body = {"query": QUERIES[len(mine) % len(QUERIES)], "top_k": 1}
            try:
                status, answer = ask(connection, "/search", body)
                mine.append((status, answer["index"]["version"] if status == 200 else ""))
            except (OSError, HTTPException):
                connection.close()
                connection = service.connect()
                mine.append((0, ""))
        connection.close()

    with ThreadPoolExecutor(connections) as pool:
        running = [pool.submit(search, number) for number in range(connections)]
        try:
            wait_until(lambda: all(answers))
            yield answers
        finally:
            end.set()
        for each in running:
            each.result(60)


def publish(indexes: Path, folder: Path, number: int, index: str = "sample") -> str:
    """Publishes another version of an index, and returns its id."""
    corpus = folder / f"{number}.jsonl"
    text = f"第{number}版新增的段落：发热三天伴咳嗽，建议到医院检查。"
    corpus.write_text(json.dumps({"_id": f"n{number}", "text": text}) + "\n", encoding="utf-8")
    folders = ["--indexes", str(indexes), "--builds", str(folder / "builds")]
    assert main(["update", "--index", index, "--add", str(corpus), *folders]) == 0
    return IndexFolder(indexes, index).active()


def test_all_workers_serve_a_version_of_another_index_after_its_reload(
    start: Start, own_indexes: Path, tmp_path: Path
) -> None:
    build_small(tmp_path, "clinic")
    service = start()
    # Enough connections for both workers, and a query of its own for each answer.
    connections = [service.connect() for _ in range(16)]

    def versions() -> set[str]:
        answers = [
            ask(each, "/indexes/clinic/search", {"query": f"第{i}个病人咳嗽", "top_k": 1})
            for i, each in enumerate(connections)
        ]
        assert {status for status, _ in answers} == {200}
        return {answer["index"]["version"] for _, answer in answers}

    first = versions()
    second = publish(own_indexes, tmp_path, 1, index="clinic")
    assert versions() == first
    status, answer = service.ask("/indexes/clinic/reload", method="POST")
    assert (status, answer["version"]) == (200, second)
    assert versions() == {second}
    (service.faults / "refuse").touch()
    publish(own_indexes, tmp_path, 2, index="clinic")
    status, answer = service.ask("/indexes/clinic/reload", method="POST")
    assert (status, answer["code"]) == (503, "refused")
    assert second in versions()
    assert service.ask("/index")[1]["name"] == "sample"


def build_small(folder: Path, index: str) -> None:
    """Builds an index of a few passages."""
    texts = (f"第{i}段：咳嗽三天，建议多饮水。" for i in range(4))
    build_index(folder, index, ({"_id": f"{index}-{i}", "text": t} for i, t in enumerate(texts)))


def test_workers_share_port_metrics_and_limits(start: Start) -> None:
    secret, entry = new_key("app", "search")
    admin, admin_entry = new_key("operator", "admin")
    limits = {"RATE_LIMIT": "0.001", "RATE_BURST": "10", "MAX_CONNECTIONS": "16"}
    service = start(API_KEYS=f"{entry},{admin_entry}", **limits)
    assert len(service.workers()) == 2
    statuses = [service.ask("/search", {"query": query}, key=secret)[0] for query in QUERIES * 2]
    assert (statuses.count(200), statuses.count(429)) == (10, 6)
    wait_until(lambda: service.metric(SEARCHED) == 10)
    assert service.ask("/metrics")[1].count("# TYPE care_http_requests_total ") == 1
    # The next look ends what is beyond the limit.
    opened = [socket.create_connection((service.host, service.port)) for _ in range(48)]
    try:
        wait_until(lambda: service.metric("care_connections") <= 16)
    finally:
        for each in opened:
            each.close()
    status, answer = service.ask("/index", key=admin)
    assert (status, answer["active"]) == (200, True)


@contextmanager
def scarce_memory() -> Iterator[Path]:
    """Yields a memory cgroup in which the kernel ends each process that needs more memory."""
    own = [line.split(":") for line in Path("/proc/self/cgroup").read_text().splitlines()]
    path = next((path for _, kinds, path in own if "memory" in kinds.split(",")), "")
    group = Path(f"/sys/fs/cgroup/memory{path}/care-test-{os.getpid()}")
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text("64K")
    except OSError:
        pytest.skip("needs root and the memory controller of cgroup version 1")
    try:
        yield group
    finally:
        group.rmdir()


@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, signal.SIGBUS, pytest.param(None, id="out of memory")],
)
def test_a_worker_that_ends_is_replaced_and_only_its_requests_fail(
    start: Start, number: int | None
) -> None:
    service = start()
    before = service.workers()
    with ExitStack() as stack:
        answers = stack.enter_context(load(service, 16))
        if number is None:
            number = signal.SIGKILL
            group = stack.enter_context(scarce_memory())
            (group / "cgroup.procs").write_text(str(before[0]))
            wait_until(lambda: "oom_kill 1" in (group / "memory.oom_control").read_text())
        else:
            os.kill(before[0], number)
        service.wait_for_workers(other_than=before)
        failed = [[status for status, _ in mine].count(0) for mine in answers]
        seen = [len(mine) for mine in answers]
        wait_until(lambda: all(len(m) > n for m, n in zip(answers, seen, strict=True)))
    # A connection of the killed worker breaks once; all others have an answer to each request.
    assert max(failed) <= 1
    assert {status for mine in answers for status, _ in mine} <= {0, 200}
    assert sum(failed) < 16
    (line,) = service.logged("worker_ended")
    assert f"signal {number}" in line["reason"]
    assert service.metric("care_worker_replacements_total") == 1
    answered = sum(status == 200 for mine in answers for status, _ in mine)
    # The page may be a second old. The killed worker may not have counted what it had just sent, or
    # have counted what did not arrive: at most one request of each of its connections.
    wait_until(lambda: service.metric(SEARCHED) >= answered - sum(failed))
    time.sleep(1.5)
    assert abs(service.metric(SEARCHED) - answered) <= sum(failed)


def test_a_stuck_worker_is_replaced_while_the_other_serves(start: Start) -> None:
    service = start()
    before = service.workers()
    os.kill(before[0], signal.SIGSTOP)
    served = 0
    for _ in range(16):
        try:
            with socket.create_connection((service.host, service.port), timeout=0.5) as client:
                client.sendall(b"GET /health/live HTTP/1.1\r\nHost: a\r\n\r\n")
                served += client.recv(12) == b"HTTP/1.1 200"
        except TimeoutError:
            pass
    assert served > 0
    service.wait_for_workers(other_than=before)
    assert service.logged("worker_stuck")
    assert before[0] not in service.workers()


def test_a_service_that_was_paused_as_a_whole_keeps_its_workers(start: Start) -> None:
    service = start()
    before = service.workers()
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in (service.process.process.pid, *before):
            os.kill(pid, number)
        time.sleep(12 if number == signal.SIGSTOP else 2.5)  # longer than a silence; two looks
    assert service.workers() == before
    assert not service.logged("worker_stuck")


def test_a_worker_that_ends_at_each_start_ends_the_service_with_the_reason(start: Start) -> None:
    service = start()
    (service.faults / "die").touch()
    os.kill(service.workers()[0], signal.SIGKILL)
    assert service.process.process.wait(60) == 1
    last = service.log.read_text().splitlines()[-1]
    assert last.startswith("error: a worker cannot be replaced: a worker ended with status 3")
    assert last.endswith("[worker_failed]")


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"PAIR": "missing"}, "unknown_pair"),
        ({"INDEX": "missing"}, "no_active_version"),
        ({"API_KEYS": "wrong"}, "invalid_key_entry"),
    ],
)
def test_a_service_that_cannot_start_says_why_once(
    own_indexes: Path, settings: dict[str, str], code: str
) -> None:
    environment = os.environ | {
        f"CARE_{name}": value
        for name, value in {
            "INDEXES": str(own_indexes),
            "PORT": "0",
            "WORKERS": "2",
            "LOG_LEVEL": "error",
            **settings,
        }.items()
    }
    command = [sys.executable, "-m", "care", "serve"]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and f"[{code}]" in errors[0]


def test_no_worker_outlives_a_supervisor_that_is_killed(start: Start) -> None:
    service = start()
    workers = service.workers()
    os.kill(workers[1], signal.SIGSTOP)
    service.process.process.kill()
    wait_until(lambda: not any(Path(f"/proc/{worker}/stat").exists() for worker in workers))


def test_sigterm_ends_all_after_their_requests(start: Start) -> None:
    service = start(CACHE_ENTRIES="0", DRAIN_SECONDS="1")
    batch = {"queries": [{"query": f"第{i}个病人夜里咳嗽怎么办"} for i in range(64)]}
    with ThreadPoolExecutor(8) as pool:
        pending = [pool.submit(service.ask, "/search/batch", batch) for _ in range(8)]
        wait_until(lambda: service.metric("care_admitted_tokens_total") > 512)
        service.process.process.terminate()
        assert {each.result(60)[0] for each in pending} == {200}
    assert service.process.process.wait(60) == 0


def test_another_service_cannot_take_a_part_of_the_port(start: Start, own_indexes: Path) -> None:
    service = start()
    for workers in ("1", "2"):
        environment = os.environ | {
            "CARE_INDEXES": str(own_indexes),
            "CARE_PORT": str(service.port),
            "CARE_WORKERS": workers,
        }
        command = [sys.executable, "-m", "care", "serve"]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 1
        assert "[address_unavailable]" in done.stderr


def test_each_connection_sees_versions_in_order_while_all_workers_switch(
    start: Start, own_indexes: Path, tmp_path: Path
) -> None:
    service = start()
    order = [IndexFolder(own_indexes, "sample").active()]
    with load(service, 50) as answers:
        for number in range(3):
            order.append(publish(own_indexes, tmp_path, number))
            status, answer = service.ask("/index/reload", method="POST")
            assert (status, answer["version"]) == (200, order[-1])
            # Each worker serves it by now.
            asked = {service.ask("/index")[1]["version"] for _ in range(12)}
            assert asked == {order[-1]}
    assert {status for mine in answers for status, _ in mine} == {200}
    for mine in answers:
        seen = [order.index(version) for _, version in mine]
        assert seen == sorted(seen)
    assert any(mine[0][1] == order[0] for mine in answers)
    assert service.metric('care_index_reloads_total{result="success"}') == 3


def test_a_version_that_one_worker_cannot_open_is_served_by_none(
    start: Start, own_indexes: Path, tmp_path: Path
) -> None:
    service = start()
    old = IndexFolder(own_indexes, "sample").active()
    (service.faults / "refuse").touch()
    new = publish(own_indexes, tmp_path, 0)
    status, problem = service.ask("/index/reload", method="POST")
    assert (status, problem["code"]) == (503, "refused")
    assert problem["detail"] == "worker 1 cannot open it"
    answers = [service.ask("/index")[1] for _ in range(12)]
    assert {(answer["version"], answer["active"]) for answer in answers} == {(old, False)}
    assert service.metric("care_index_fallback") == 1
    assert service.metric('care_index_reloads_total{result="failure"}') == 1
    (line,) = service.logged("refused")
    assert line["served"] == old
    (service.faults / "refuse").unlink()
    status, answer = service.ask("/index/reload", method="POST")
    assert (status, answer["version"], answer["active"]) == (200, new, True)
    wait_until(lambda: service.metric("care_index_fallback") == 0)


def test_a_damaged_version_is_replaced_by_the_last_whole_one_in_all_workers(
    start: Start, own_indexes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = IndexFolder(own_indexes, "sample").active()
    monkeypatch.setattr("indexer.live.segment.MOST_ROWS", 0)  # files of its own, which are mapped
    new = publish(own_indexes, tmp_path, 0)
    service = start(WATCH_SECONDS="0.2")
    folder = IndexFolder(own_indexes, "sample").version(new)
    before = service.workers()
    os.truncate(folder / "vectors.faiss", 100)
    wait_until(lambda: service.ask("/index")[1]["version"] == old)
    wait_until(lambda: service.metric("care_workers") == 2)
    answers = [service.ask("/search", {"query": query}) for query in QUERIES]
    assert {status for status, _ in answers} == {200}
    assert {answer["index"]["version"] for _, answer in answers} == {old}
    assert len(before) == 2


def test_a_replaced_key_file_is_counted_once(start: Start, tmp_path: Path) -> None:
    first, entry = new_key("app", "search")
    keys = tmp_path / "keys"
    keys.write_text(entry)
    service = start(API_KEYS_FILE=str(keys))
    second, entry = new_key("app", "search")
    keys.write_text(entry)
    statuses = lambda key: {service.ask("/index", key=key)[0] for _ in range(12)}  # noqa: E731
    wait_until(lambda: statuses(second) == {200})
    assert statuses(first) == {401}
    wait_until(lambda: service.metric('care_api_key_reloads_total{result="success"}') == 1)


def test_what_one_worker_has_found_all_have_in_their_cache(start: Start) -> None:
    service = start()
    body = {"query": QUERIES[0], "top_k": 3}
    first = service.ask("/search", body)[1]
    others = [service.ask("/search", body)[1] for _ in range(16)]
    assert not first["cached"]
    assert all(other["cached"] for other in others)
    assert all(other["hits"] == first["hits"] for other in others)
    assert service.metric("care_batch_queries_sum") == 1


def test_a_free_port_is_the_same_for_all_workers(start: Start) -> None:
    port = free_port()
    service = start(PORT=str(port))
    assert service.port == port
    assert all(service.ask("/health/live")[0] == 200 for _ in range(8))
