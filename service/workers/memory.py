"""The memory that a supervisor and its workers share: limits, rates, metrics, beats and a cache.

It is a file without a name (memfd), which is gone with the last process that has it open. Each
worker writes only numbers of its own, so no lock is needed, except for the rates of API keys. What
a killed worker has counted stays counted.
"""

import fcntl
import json
import mmap
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from hashlib import blake2b
from threading import Lock
from typing import Any, NamedTuple, cast

import prometheus_client
from prometheus_client import values
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.utils import floatToGoString

from service.access.rate_limit import Buckets
from service.limits import Usage, Usages
from service.observe.metrics import Metrics
from service.workers.cache import PLACE, SharedTable

_WORD = 8  # all numbers are int64 or float64 [bytes]
_NAMES = 1 << 15  # of rates: more than a file of keys and tokens can have
# Bytes for the metrics of one process, ten times what they take. Pages that are not used take no
# memory.
_METRICS = 4 << 20
_USAGES = tuple(field.name for field in fields(Usages))


class SharedMemory:
    """The memory of one service, mapped by its supervisor and its workers.

    `file` is the descriptor of the file. `worker` is the number of this worker; the supervisor has
    the number `workers`. `entries` is the number of queries in the cache.
    """

    def __init__(self, file: int, workers: int, worker: int, entries: int = 0) -> None:
        self.file, self.workers, self.worker = file, workers, worker
        self._memory = memoryview(mmap.mmap(file, self._size(workers, entries)))
        numbers = self._memory[: self._numbers(workers) * _WORD].cast("q")
        of_workers = [numbers[i * workers : (i + 1) * workers] for i in range(len(_USAGES) + 1)]
        *self._usages, self._beats = of_workers
        used = len(of_workers) * workers
        self._processes = numbers[used : used + workers + 1]
        used += workers + 1
        self._flags, self._secret = numbers[used : used + 1], numbers[used + 1 : used + 5]
        self._buckets = numbers[used + 5 :]
        self._entries = entries

    @classmethod
    def create(cls, workers: int, entries: int = 0) -> "SharedMemory":
        """Returns the memory of a new supervisor."""
        file = os.memfd_create("care")
        os.ftruncate(file, cls._size(workers, entries))
        memory = cls(file, workers, workers, entries)
        memory._secret.cast("B")[:] = os.urandom(32)
        return memory

    @staticmethod
    def _numbers(workers: int) -> int:
        # Usages and beats, processes, flags, secret, and the buckets of rates.
        return (len(_USAGES) + 1) * workers + workers + 1 + 1 + 4 + 2 * _NAMES

    @classmethod
    def _size(cls, workers: int, entries: int) -> int:
        return cls._numbers(workers) * _WORD + (workers + 1) * _METRICS + entries * PLACE

    @property
    def usages(self) -> Usages:
        """What the workers take of their limits."""
        return Usages(*(Usage(cast("Any", taken), self.worker) for taken in self._usages))

    @property
    def buckets(self) -> "SharedBuckets":
        """The rates of API keys."""
        return SharedBuckets(self.file, self._buckets)

    @property
    def secret(self) -> str:
        """A secret of this service, new at each start."""
        return bytes(self._secret).hex()

    @property
    def table(self) -> SharedTable:
        """The cache of queries."""
        end = len(self._memory)
        return SharedTable(self._memory[end - self._entries * PLACE : end])

    @property
    def fallback(self) -> bool:
        """Whether another version than the active one is served."""
        return bool(self._flags[0])

    @fallback.setter
    def fallback(self, value: bool) -> None:
        self._flags[0] = value

    def start(self) -> None:
        """Notes the id of this process."""
        self._processes[self.worker] = os.getpid()

    def beat(self) -> None:
        """Notes that the event loop of this worker runs."""
        self._beats[self.worker] = time.monotonic_ns()

    def silence(self, worker: int) -> float:
        """Returns the time since the last beat of a worker [s], 0 if it has had none."""
        beat = self._beats[worker]
        return (time.monotonic_ns() - beat) / 1e9 if beat else 0.0

    def forget(self, worker: int) -> None:
        """Takes back all that a worker which has ended takes; its counters stay."""
        for taken in (*self._usages, self._beats, self._processes):
            taken[worker] = 0
        table = self._series(worker)
        for key, place in table.places.items():
            if key.type == "gauge":
                table.values[place] = 0.0

    def metrics(self) -> Metrics:
        """Returns the metrics of this process; their page is that of all processes.

        From now on all metrics of this process are in the memory: the library makes their values by
        a class that it has once.
        """
        values.ValueClass = _value_class(self._series(self.worker))
        processes = _Processes(self._processes)
        metrics = Metrics(processes)
        page = _Page(metrics.registry, [self._series(i) for i in range(self.workers + 1)])
        metrics.render = lambda: prometheus_client.generate_latest(cast("Any", page))
        return metrics

    def _series(self, process: int) -> "_Series":
        start = self._numbers(self.workers) * _WORD + process * _METRICS
        return _Series(self._memory[start : start + _METRICS])


class SharedBuckets(Buckets):
    """The theoretical arrival time [us] of each name, in the memory of all workers.

    Args:
        file: The descriptor whose lock guards them; a worker that ends releases it.
        numbers: int64 [2 n]: checksum and time of each name, by open addressing; 0 is a free place.
    """

    def __init__(self, file: int, numbers: memoryview) -> None:
        self._file = file
        self._numbers = cast("Any", numbers)
        self._places: dict[str, int] = {}

    @contextmanager
    def locked(self) -> Iterator[None]:
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1)

    def get(self, name: str) -> int:
        return int(self._numbers[self._place(name) + 1])

    def put(self, name: str, full_at: int) -> None:
        self._numbers[self._place(name) + 1] = full_at

    def _place(self, name: str) -> int:
        if name not in self._places:
            digest = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), signed=True)
            digest = digest or 1
            place = digest % _NAMES
            while self._numbers[2 * place] not in (0, digest):
                place = (place + 1) % _NAMES
            self._numbers[2 * place] = digest
            self._places[name] = 2 * place
        return self._places[name]


class _Key(NamedTuple):
    """What identifies a series: its metric, its own name and labels."""

    type: str
    mode: str
    metric: str
    name: str
    labels: tuple[tuple[str, str], ...]


class _Series:
    """The series of one process, in the order in which they began.

    The memory begins with the number of its bytes that are used. A series is the length of its key,
    its key as JSON, padded to whole words, and its value.
    """

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._numbers = memory.cast("q")
        self.values = cast("Any", memory.cast("d"))  # all words of the memory as float64
        self._places: dict[_Key, int] = {}
        self._read = 1  # words

    @property
    def places(self) -> dict[_Key, int]:
        """The place of the value of each series among `values`."""
        while self._read < max(1, self._numbers[0]):
            size = self._numbers[self._read]
            start = (self._read + 1) * _WORD
            *names, labels = json.loads(bytes(self._memory[start : start + size]))
            key = _Key._make([*names, tuple(map(tuple, labels))])
            place = self._read + 1 + -(-size // _WORD)
            self._places[key] = place
            self._read = place + 1
        return self._places

    def place(self, key: _Key) -> int:
        """Returns the place of the value of a series, which begins if it is new."""
        if key not in self.places:
            text = json.dumps(key).encode()
            self._numbers[self._read] = len(text)
            start = (self._read + 1) * _WORD
            self._memory[start : start + len(text)] = text
            # Last, because from then on others read it.
            self._numbers[0] = self._read + 2 + -(-len(text) // _WORD)
        return self.places[key]


def _value_class(series: _Series) -> Any:
    """Returns the class of values that the library is to use: they are in the shared memory."""
    beginning = Lock()

    class Value:
        _multiprocess = False

        def __init__(
            self,
            type: str,
            metric: str,
            name: str,
            labels: Iterable[str],
            of_labels: Iterable[str],
            help: str,
            multiprocess_mode: str = "",
            **_: object,
        ) -> None:
            key = _Key(
                type, multiprocess_mode, metric, name, tuple(zip(labels, of_labels, strict=True))
            )
            self._lock = Lock()
            with beginning:
                self._place = series.place(key)
            # A counter starts with the value that the replaced worker left; a gauge starts at 0.
            self._value = 0.0 if type == "gauge" else series.values[self._place]
            self.set(self._value)

        def inc(self, amount: float) -> None:
            with self._lock:
                self._value += amount
                series.values[self._place] = self._value

        def set(self, value: float, timestamp: float | None = None) -> None:
            with self._lock:
                self._value = value
                series.values[self._place] = value

        def get(self) -> float:
            return self._value

        def get_exemplar(self) -> None:
            return None

    return Value


class _Page:
    """All series of all processes as one registry, which the library can render.

    Counters and histograms are summed, and gauges by their mode: the sum, or the largest one.
    """

    def __init__(self, registry: CollectorRegistry, processes: Iterable[_Series]) -> None:
        self._registry = registry
        self._processes = list(processes)
        self._reading = Lock()

    def collect(self) -> Iterator[Metric]:
        found: dict[str, dict[_Key, float]] = defaultdict(dict)
        with self._reading:
            for process in self._processes:
                for key, place in process.places.items():
                    value, of_metric = process.values[place], found[key.metric]
                    if key in of_metric:
                        both = of_metric[key], value
                        value = max(both) if key.mode == "max" else sum(both)
                    of_metric[key] = value
        for metric in self._registry.collect():
            if metric.name in found:
                metric.samples = []
                _add_samples(metric, found[metric.name])
            yield metric


def _add_samples(metric: Metric, series: dict[_Key, float]) -> None:
    buckets: dict[tuple[tuple[str, str], ...], list[tuple[float, float]]] = defaultdict(list)
    for key, value in series.items():
        if metric.type == "histogram" and key.name.endswith("_bucket"):
            *labels, (_, limit) = key.labels
            buckets[tuple(labels)].append((float(limit), value))
        # Of the versions that were served only one is shown.
        elif value or metric.name != "care_index_info":
            metric.add_sample(key.name, dict(key.labels), value)
    for of_series, counts in buckets.items():
        total = 0.0
        for bound, amount in sorted(counts):
            total += amount
            labels_of_bucket = dict(of_series) | {"le": floatToGoString(bound)}  # type: ignore[no-untyped-call]
            metric.add_sample(f"{metric.name}_bucket", labels_of_bucket, total)
        metric.add_sample(f"{metric.name}_count", dict(of_series), total)


class _Processes(Collector):
    """The metrics of all processes of a service: sums, and the time at which the first one started.

    `processes`, int64 [workers + 1], are their ids, 0 for one that does not run.
    """

    def __init__(self, processes: memoryview) -> None:
        self._processes = processes

    def collect(self) -> Iterable[Metric]:
        found: dict[str, Metric] = {}
        for process in filter(None, self._processes):
            # The collector calls `pid` at once.
            of_one = prometheus_client.ProcessCollector(pid=partial(int, process), registry=None)
            for metric in of_one.collect():
                (sample,) = metric.samples
                if metric.name in found:
                    (other,) = found[metric.name].samples
                    both = sample.value, other.value
                    value = min(both) if "start_time" in metric.name else sum(both)
                    metric.samples = [sample._replace(value=value)]
                found[metric.name] = metric
        return found.values()
