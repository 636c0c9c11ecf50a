"""Encoding on the actors of a Ray cluster; texts and vectors are sent through Ray's object store.

An actor receives a shard and encodes it with the local executor. Only the driver writes files, in
the order of shards; shards in its journal are not encoded again.
"""

import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from core.encoders import Encoder, EncoderSpec, Encoding
from core.errors import CareError, ProviderError
from indexer.encoding import LocalExecutor, Report, Shard

LOCAL = "local"

# Actors that may crash while they encode one shard before the build fails.
_ATTEMPTS = 3
# Shards per actor that are being encoded, or are held in memory until earlier ones are written.
_AHEAD = 4
_OBJECT_STORE_BYTES = 200 * 2**20
_STARTS = 3
_CONNECT_SECONDS = 10

_log = logging.getLogger(__name__)


@dataclass
class RayExecutor:
    """Encodes shards on the actors of a Ray cluster.

    Batches depend only on the shard, so the vectors equal those of the local executor for any
    number of actors, and each executor can resume a build of the other. Ray restarts a crashed
    actor, and its shard is encoded again.
    """

    make_encoder: Callable[[], Encoder]  # makes the document encoder; called once in each actor
    batch_size: int
    _: KW_ONLY
    # Address of the cluster, or "local" to start one for the duration of the call.
    address: str = LOCAL
    actors: int = 1
    threads: int = 1  # processors per actor without GPUs
    gpus: int = 0  # GPUs per actor, if the cluster has GPUs
    # Time in which an actor's encoder was busy, on average [s].
    encoder_seconds: float = field(default=0.0, init=False)

    def encode(self, shards: Iterator[Shard], report: Report) -> Iterator[Shard]:
        """Encodes shards and yields them in order; reports after each shard."""
        with connected(self.address, self.actors * self.threads):
            gpus = self.gpus if ray.cluster_resources().get("GPU") else 0
            kind = ray.remote(
                num_cpus=1 if gpus else self.threads,
                num_gpus=gpus,
                max_restarts=-1,
                max_task_retries=_ATTEMPTS - 1,
            )(_Actor)
            idle = [kind.remote(self.make_encoder, self.batch_size) for _ in range(self.actors)]
            running: dict[Any, tuple[Shard, Any]] = {}
            queue: deque[Shard] = deque()
            complete: set[int] = set()
            coming = next(shards, None)
            while coming or queue:
                while coming and len(queue) < _AHEAD * self.actors and (idle or not coming.new):
                    if coming.new:
                        actor = idle.pop()
                        running[actor.encode.remote(coming)] = coming, actor
                    else:
                        complete.add(coming.number)
                    queue.append(coming)
                    coming = next(shards, None)
                if queue[0].number in complete:
                    yield queue.popleft()
                    continue
                ready = ray.wait(list(running))[0][0]
                shard, actor = running.pop(ready)
                made, seconds = _result(ready, shard.number)
                shard.vectors, shard.failed = made.vectors, made.failed
                shard.tokens, shard.truncated = made.tokens, made.truncated
                shard.token_vectors = made.token_vectors
                self.encoder_seconds += seconds / self.actors
                report(shard, len(shard.new), shard.tokens)
                complete.add(shard.number)
                idle.append(actor)


@dataclass(frozen=True)
class RemoteEncoder:
    """Placeholder for a document encoder that only the actors load."""

    spec: EncoderSpec

    def encode(self, texts: Sequence[str]) -> Encoding:
        """Raises ProviderError: only the executor encodes."""
        raise ProviderError("the document encoder is loaded only by the actors of Ray")


@contextmanager
def connected(address: str, processors: int) -> Generator[None]:
    """Connects to a cluster; the address "local" starts one with that many processors."""
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    local_settings = {
        "num_cpus": processors,
        "include_dashboard": False,
        "object_store_memory": _OBJECT_STORE_BYTES,
    }
    try:
        _check(address)
        _init(address, **(local_settings if address == LOCAL else {}))
    except (OSError, RuntimeError, ValueError) as error:
        message = f"the Ray cluster at '{address}' cannot be used: {error}"
        raise ProviderError(message, code="ray_unavailable", address=address) from error
    try:
        yield
    finally:
        ray.shutdown()


def _init(address: str, **settings: Any) -> None:
    """Starts Ray or connects to it; retries if the node does not start.

    Sometimes a new node does not register with its control service. Ray then raises a plain
    `Exception` after 30 seconds.
    """
    for attempt in range(1, _STARTS + 1):
        try:
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **settings)
            return
        except Exception as error:
            ray.shutdown()
            if type(error) is not Exception:
                raise
            if attempt == _STARTS:
                raise RuntimeError(str(error)) from error
            _log.warning("the Ray node did not start: retrying")


def _check(address: str) -> None:
    """Raises OSError if nothing listens at the address, which Ray would retry for minutes."""
    host, _, port = address.rpartition("/")[2].rpartition(":")
    if port.isdecimal():
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()


def _result(reference: Any, shard: int) -> tuple[Shard, float]:
    """Returns the shard that an actor has encoded, and the time its encoder was busy [s]."""
    try:
        made: tuple[Shard, float] | dict[str, Any] = ray.get(reference)
    except RayActorError as error:
        if "creation task" in str(error):
            raise _ray_error(error) from error
        raise ProviderError(
            f"{_ATTEMPTS} actors crashed while they encoded shard {shard}: see Ray's logs; the "
            "most common cause is too little memory (use a smaller --batch-size)",
            code="workers_died",
            shard=shard,
        ) from error
    except RayError as error:
        raise _ray_error(error) from error
    if isinstance(made, dict):
        raise CareError(**made)
    return made


def _ray_error(error: RayError) -> ProviderError:
    reason = str(error).strip().splitlines()[-1]
    return ProviderError(f"Ray failed during encoding: {reason}", code="ray_failed")


class _Actor:
    """The Ray actor; it runs the local executor on one shard per call."""

    def __init__(self, make_encoder: Callable[[], Encoder], batch_size: int) -> None:
        self._make_encoder = make_encoder
        self._batch_size = batch_size
        self._encoder: Encoder | None = None

    def encode(self, shard: Shard) -> tuple[Shard, float] | dict[str, Any]:
        """Encodes a shard; returns errors as data, because Ray would wrap exceptions."""
        try:
            # Loaded here and not in __init__, so that a crash counts as an attempt.
            self._encoder = self._encoder or self._make_encoder()
            local = LocalExecutor(self._encoder, self._batch_size)
            # Arrays from Ray's object store are read-only.
            shard.vectors = shard.vectors.copy()
            (made,) = local.encode(iter([shard]), lambda *_: None)
            return made, local.encoder_seconds
        except CareError as error:
            return {"message": str(error), "code": error.code, **error.fields}
        except Exception as error:  # the boundary of the process
            _log.exception("encoding shard %d", shard.number)
            message = f"the encoder failed with {type(error).__name__}: {error}"
            return {"message": message, "code": "worker_failed", "shard": shard.number}
