"""Several workers serve as one service, also when one of them fails."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
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

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Lets worker 1 refuse to open versions while the block runs."""
        (self.faults / "refuse").touch()
        try:
            yield
        finally:
            (self.faults / "refuse").unlink()

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


@contextmanager
def services(folder: Path, indexes: Path) -> Iterator[Start]:
    """Yields a function that starts services of two workers, which end with the block."""
    faults = folder / "faults"
    faults.mkdir()
    (faults / "sitecustomize.py").write_text(FAULTS)
    started: list[ServerProcess] = []

    def start(**settings: str) -> Service:
        log = folder / f"log {len(started)}"
        paths = os.pathsep.join([str(faults), *filter(None, sys.path)])
        environment = os.environ | {"PYTHONPATH": paths}
        # What a process writes on standard error goes to a file.
        code = (
            "import os, sys; from care.cli.main import main;"
            f"os.dup2(os.open({str(log)!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2);"
            "sys.exit(main(['serve']))"
        )
        given = {"WORKERS": "2", "WATCH_SECONDS": "0", **settings}
        process = start_service(indexes, "sample", given, environment, launcher=("-c", code))
        started.append(process)
        return Service(process, log, faults)

    try:
        yield start
    finally:
        for process in started:
            process.process.kill()
            process.process.wait()


@pytest.fixture
def start(own_indexes: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts a service of two workers."""
    with services(tmp_path, own_indexes) as start:
        yield start


@pytest.fixture(scope="module")
def shared_folder(indexes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with indexes 'sample', which tests may change, and 'clinic'."""
    folder = tmp_path_factory.mktemp("shared")
    shutil.copytree(indexes, folder / "indexes")
    build_small(folder, "clinic")
    return folder


@pytest.fixture(scope="module")
def service(shared_folder: Path) -> Iterator[Service]:
    """A service of these indexes for all tests that leave two workers and no fault behind."""
    with services(shared_folder, shared_folder / "indexes") as start:
        yield start()


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
    service: Service, shared_folder: Path, tmp_path: Path
) -> None:
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
    second = publish(shared_folder / "indexes", tmp_path, 1, index="clinic")
    assert versions() == first
    status, answer = service.ask("/indexes/clinic/reload", method="POST")
    assert (status, answer["version"]) == (200, second)
    assert versions() == {second}
    with service.refusing():
        publish(shared_folder / "indexes", tmp_path, 2, index="clinic")
        status, answer = service.ask("/indexes/clinic/reload", method="POST")
        assert (status, answer["code"]) == (503, "refused")
    assert second in versions()
    assert service.ask("/indexes/clinic/reload", method="POST")[0] == 200
    assert second not in versions()
    assert service.ask("/index")[1]["name"] == "sample"


def build_small(folder: Path, index: str) -> None:
    """Builds an index of a few passages."""
    texts = (f"第{i}段：咳嗽三天，建议多饮水。" for i in range(4))
    build_index(folder, index, ({"_id": f"{index}-{i}", "text": t} for i, t in enumerate(texts)))


def test_workers_share_port_metrics_and_limits(start: Start) -> None:
    secret, entry = new_key("app", "search")
    admin, admin_entry = new_key("operator", "admin")
    limits = {"RATE_LIMIT": "0.001", "RATE_BURST": "10", "MAX_CONNECTIONS": "16"}
    port = free_port()
    service = start(API_KEYS=f"{entry},{admin_entry}", PORT=str(port), **limits)
    assert (service.port, len(service.workers())) == (port, 2)
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


def test_a_worker_that_ends_is_replaced_and_only_its_requests_fail(start: Start) -> None:
    service = start()
    before = service.workers()
    with load(service, 16) as answers:
        os.kill(before[0], signal.SIGKILL)
        service.wait_for_workers(other_than=before)
        failed = [[status for status, _ in mine].count(0) for mine in answers]
        seen = [len(mine) for mine in answers]
        wait_until(lambda: all(len(m) > n for m, n in zip(answers, seen, strict=True)))
    # A connection of the killed worker breaks once; all others have an answer to each request.
    assert max(failed) <= 1
    assert {status for mine in answers for status, _ in mine} <= {0, 200}
    assert sum(failed) < 16
    (line,) = service.logged("worker_ended")
    assert f"signal {signal.SIGKILL}" in line["reason"]
    assert service.metric("care_worker_replacements_total") == 1
    answered = sum(status == 200 for mine in answers for status, _ in mine)
    # The page may be a second old. The killed worker may not have counted what it had just sent, or
    # have counted what did not arrive: at most one request of each of its connections.
    wait_until(lambda: service.metric(SEARCHED) >= answered - sum(failed))
    time.sleep(1.5)
    assert abs(service.metric(SEARCHED) - answered) <= sum(failed)

    # If none takes its place, the service ends.
    (service.faults / "die").touch()
    os.kill(service.workers()[0], signal.SIGKILL)
    assert service.process.process.wait(60) == 1
    last = service.log.read_text().splitlines()[-1]
    assert last.startswith("error: a worker cannot be replaced: a worker ended with status 3")
    assert last.endswith("[worker_failed]")


def test_a_stuck_worker_is_replaced_while_the_other_serves(service: Service) -> None:
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


def test_a_service_that_was_paused_as_a_whole_keeps_its_workers(service: Service) -> None:
    before, stuck = service.workers(), service.logged("worker_stuck")
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in (service.process.process.pid, *before):
            os.kill(pid, number)
        time.sleep(12 if number == signal.SIGSTOP else 2.5)  # longer than a silence; two looks
    assert service.workers() == before
    assert service.logged("worker_stuck") == stuck


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"PAIR": "missing"}, "unknown_pair"),
        ({"INDEX": "missing"}, "no_active_version"),
    ],
)
def test_a_service_that_cannot_start_says_why_once(
    indexes: Path, settings: dict[str, str], code: str
) -> None:
    done = serve(INDEXES=str(indexes), PORT="0", LOG_LEVEL="error", **settings)
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and f"[{code}]" in errors[0]


def serve(**settings: str) -> "subprocess.CompletedProcess[str]":
    """Runs a service of two workers that cannot start."""
    variables = {f"CARE_{name}": value for name, value in settings.items()} | {"CARE_WORKERS": "2"}
    return subprocess.run(
        [sys.executable, "-m", "care", "serve"],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


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


def test_another_service_cannot_take_a_part_of_the_port(service: Service, indexes: Path) -> None:
    done = serve(INDEXES=str(indexes), PORT=str(service.port))
    assert done.returncode == 1
    assert "[address_unavailable]" in done.stderr


def test_each_connection_sees_versions_in_order_while_all_workers_switch(
    service: Service, shared_folder: Path, tmp_path: Path
) -> None:
    indexes, reloads = shared_folder / "indexes", 'care_index_reloads_total{result="success"}'
    order, before = [service.ask("/index")[1]["version"]], service.metric(reloads)
    with load(service, 50) as answers:
        for number in range(3):
            order.append(publish(indexes, tmp_path, number))
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
    wait_until(lambda: service.metric(reloads) >= before + 3)


def test_a_version_that_one_worker_cannot_open_is_served_by_none(
    service: Service, shared_folder: Path, tmp_path: Path
) -> None:
    failures = 'care_index_reloads_total{result="failure"}'
    old, before = service.ask("/index")[1]["version"], service.metric(failures)
    with service.refusing():
        new = publish(shared_folder / "indexes", tmp_path, 3)
        status, problem = service.ask("/index/reload", method="POST")
        assert (status, problem["code"]) == (503, "refused")
        assert problem["detail"] == "worker 1 cannot open it"
        answers = [service.ask("/index")[1] for _ in range(12)]
        assert {(answer["version"], answer["active"]) for answer in answers} == {(old, False)}
        wait_until(lambda: service.metric("care_index_fallback") == 1)
        wait_until(lambda: service.metric(failures) > before)
        assert service.logged("refused")[-1]["served"] == old
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


def test_what_one_worker_has_found_all_have_in_their_cache(service: Service) -> None:
    body = {"query": "这个问题只在这里提出", "top_k": 3}
    first = service.ask("/search", body)[1]
    others = [service.ask("/search", body)[1] for _ in range(16)]
    assert not first["cached"]
    assert all(other["cached"] for other in others)
    assert all(other["hits"] == first["hits"] for other in others)
