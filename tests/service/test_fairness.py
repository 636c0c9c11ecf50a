"""Clients that share the service: turns in queues, shares of limits, half-sent requests."""

from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from random import Random
from threading import Event

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from service.limits import Client, Limits, Shares, Usage
from service.pipeline.fairness import FairExecutor, FairQueue
from service.settings import Settings
from tests.conftest import ADMIN_KEY, SEARCH_KEY
from tests.service.conftest import ADMIN, BLOCKED, BlockingEncoder, Serve, sample, wait_until
from tests.service.test_pipeline import queued

PUSHES = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9)), max_size=40)


@given(pushes=PUSHES)
def test_items_of_a_client_are_served_in_order(pushes: list[tuple[str, int]]) -> None:
    queue: FairQueue[tuple[str, int]] = FairQueue()
    for i, (client, cost) in enumerate(pushes):
        queue.push((client, i), Client(client), cost)
    served = [queue.take()[0][1] for _ in pushes]
    assert len(queue) == 0
    for client in "abc":
        own = [i for name, i in served if name == client]
        assert own == sorted(own)


def test_clients_take_turns_by_the_cost_of_their_items() -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(100):
        queue.push("large", Client("large"), 10)
    for _ in range(3):
        queue.take()
    for _ in range(20):
        queue.push("small", Client("small"), 1)
    # For each item of cost 10 there are ten of cost 1.
    served = "".join(queue.take()[0][1][0] for _ in range(22))
    assert served.count("s") == 20
    assert served.index("l") in (9, 10)


def test_items_that_are_put_back_keep_their_turns_whatever_arrives() -> None:
    queue: FairQueue[int] = FairQueue()
    for i in range(5):
        queue.push(i, Client("old"))
    random = Random(0)
    waited = 0
    while True:
        (first, *others) = queue.take(3)
        if first[1] == 4:
            break
        for turn, item in others:
            queue.put_back(turn, item)
        queue.push(1000 + waited, Client(f"new {random.random()}"))
        waited += 1
        assert waited < 20, "an item waits forever"


def test_an_item_that_goes_first_does_not_cost_a_turn() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push("a", Client("client"))
    queue.push("urgent", Client("client"), first=True)
    assert [queue.take()[0][1] for _ in range(2)] == ["urgent", "a"]


def test_functions_run_in_turn_and_pass_on_their_results() -> None:
    ran: list[str] = []
    release = Event()
    with ThreadPoolExecutor(1) as pool:
        executor = FairExecutor(pool)
        blocked = executor.submit(Client("large"), lambda: release.wait(30))
        many = [executor.submit(Client("large"), lambda: ran.append("large")) for _ in range(9)]
        one = executor.submit(Client("small"), lambda: ran.append("small"))
        gone = executor.submit(Client("small"), lambda: ran.append("gone"))
        failed = executor.submit(Client("small"), lambda: 1 // 0)
        assert gone.cancel()
        release.set()
        assert blocked.result() is True
        assert isinstance(failed.exception(), ZeroDivisionError)
        for future in (one, *many):
            future.result()
    assert ran.index("small") <= 1
    assert ran.count("large") == 9
    assert "gone" not in ran


@given(
    requests=st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 30)), max_size=60),
    limit=st.integers(1, 100),
)
def test_shares_are_below_twice_the_limit_and_nobody_is_kept_out(
    requests: list[tuple[str, int]], limit: int
) -> None:
    shares = Shares(limit)
    taken: list[tuple[str, int]] = []
    for client, amount in requests:
        if shares.allow(Client(client), amount):
            shares.take(Client(client), amount)
            taken.append((client, amount))
        assert shares.usage.total == sum(each for _, each in taken) < 2 * limit
    holders = {client for client, amount in taken if amount}
    if holders and limit > len(holders):
        assert shares.allow("new", limit // (len(holders) + 1))
    for client, amount in taken:
        shares.take(Client(client), -amount)
    assert shares.usage.total == 0
    assert shares.allow("any", limit)


@pytest.fixture
def encoder() -> Iterator[BlockingEncoder]:
    encoder = BlockingEncoder()
    yield encoder
    encoder.release.set()


def keys() -> dict[str, SecretStr]:
    return {"api_keys": SecretStr(f"{SEARCH_KEY},{ADMIN_KEY}")}


APP = {"Authorization": "Bearer asks"}
OTHER = ADMIN


def test_indexes_take_turns_however_many_clients_they_have() -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(50):
        for client in "abcd":
            queue.push("crowded", Client(client, "crowded"))
        queue.push("quiet", Client("a", "quiet"))
    served = [item for _ in range(60) for _, item in queue.take()]
    assert 25 <= served.count("quiet") <= 35


def test_an_index_is_served_however_many_new_ones_come() -> None:
    queue: FairQueue[str] = FairQueue()
    for i in range(8):
        queue.push("mine", Client("a", "mine"), 10)
        queue.push("first of another", Client("a", f"before {i}"), 10)
    served = []
    for i in range(40):
        ((_, item),) = queue.take()
        served.append(item)
        queue.push("first of another", Client("a", f"index {i}"), 10)
    assert served.count("mine") >= 4


def test_an_index_keeps_its_share_of_a_limit_however_many_clients_another_has() -> None:
    shares = Shares(120)
    for client in map(str, range(6)):
        shares.take(Client(client, "crowded"), 20)
    quiet = Client("a", "quiet")
    assert shares.allow(quiet, 60) and not shares.allow(quiet, 61)
    assert not shares.allow(Client("0", "crowded"), 1)


@pytest.mark.parametrize("mode", ["dense", "hybrid"])
def test_a_query_does_not_wait_for_the_batches_of_another_client(
    serve: Serve, encoder: BlockingEncoder, mode: str
) -> None:
    client = serve(encoder, batch_tokens=64, cache_entries=0, **keys())
    answered: list[str] = []

    def ask(path: str, body: dict[str, object], headers: dict[str, str], name: str) -> None:
        assert client.post(path, json=body, headers=headers).status_code == 200
        answered.append(name)

    with ThreadPoolExecutor(9) as pool:
        pending = [pool.submit(ask, "/search", {"query": BLOCKED}, APP, "blocked")]
        assert encoder.entered.wait(30)
        for i in range(4):
            queries = [{"query": f"第{i}批第{j}个问题", "mode": mode} for j in range(16)]
            pending.append(pool.submit(ask, "/search/batch", {"queries": queries}, APP, "batch"))
        wait_until(lambda: queued(client) >= 65)
        pending.append(pool.submit(ask, "/search", {"query": "发热", "mode": mode}, OTHER, "one"))
        wait_until(lambda: queued(client) >= 66)
        encoder.release.set()
        for each in pending:
            each.result()
    # Beside it the first batch of the other client may end, but no other one.
    assert answered.index("one") <= 2


def test_a_full_queue_admits_the_share_of_another_client(
    serve: Serve, encoder: BlockingEncoder
) -> None:
    client = serve(encoder, queue_tokens=40, **keys())
    with ThreadPoolExecutor(8) as pool:
        pending = [pool.submit(client.post, "/search", json={"query": BLOCKED}, headers=APP)]
        assert encoder.entered.wait(30)
        queries = [{"query": f"{i}高血压怎么办呢"} for i in range(3)]
        body = {"queries": queries}
        pending.append(pool.submit(client.post, "/search/batch", json=body, headers=APP))
        wait_until(lambda: queued(client) >= 4)
        full = {"query": "发热咳嗽怎么办"}
        assert client.post("/search", json=full, headers=APP).status_code == 429
        pending.append(pool.submit(client.post, "/search", json=full, headers=OTHER))
        wait_until(lambda: queued(client) >= 5)
        encoder.release.set()
        assert {each.result().status_code for each in pending} == {200}
    assert sample(client, "care_queue_tokens") == 0


@given(st.integers(1, 64), st.integers(0, 10_000))
def test_caches_are_divided_among_workers_and_other_limits_are_not(
    workers: int, entries: int
) -> None:
    whole = Limits.of(Settings(cache_entries=entries))
    part = Limits.of(Settings(cache_entries=entries, workers=workers))
    assert part.cache_entries * workers <= max(entries, workers)
    assert (part.cache_entries > 0) == (entries > 0)
    assert part.cache_bytes * workers <= whole.cache_bytes
    caches = {"cache_entries": entries, "cache_bytes": whole.cache_bytes}
    assert replace(part, **caches) == whole


@given(
    workers=st.integers(1, 5),
    limit=st.integers(1, 100),
    amounts=st.lists(st.tuples(st.integers(0, 4), st.integers(-30, 30)), max_size=80),
)
def test_workers_take_what_others_leave_and_always_their_part(
    workers: int, limit: int, amounts: list[tuple[int, int]]
) -> None:
    taken = array("q", [0] * workers)
    usages = [Usage(taken, worker) for worker in range(workers)]
    for worker, amount in amounts:
        usage = usages[worker % workers]
        if amount < 0:
            usage.add(max(amount, -usage.own))
            continue
        allowed = usage.allows(amount, limit)
        if sum(taken) + amount <= limit or usage.own + amount <= limit // workers:
            assert allowed
            usage.add(amount)
        else:
            assert not allowed
        assert usage.total == sum(taken) < 2 * limit
        # Beyond the limit, no worker has more than one could have alone.
        assert usage.own <= limit
