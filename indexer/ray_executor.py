"""Encoding by the actors of a Ray cluster; texts and vectors travel through Ray's object store.

An actor is given a shard and returns it encoded by the local executor. Only the driver writes, in
the order of shards: what is in its journal is never encoded again.
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

# Actors that may die over one shard before the build ends.
_ATTEMPTS = 3
# Shards per actor that are encoded, or wait in memory for an earlier one to be written.
_AHEAD = 4
_OBJECT_STORE_BYTES = 200 * 2**20
_STARTS = 3
_CONNECT_SECONDS = 10

_log = logging.getLogger(__name__)


@dataclass
class RayExecutor:
    """Encodes shards on the actors of a Ray cluster.

    Batches depend on the shard alone, so the vectors are those of the local executor, however
    many actors there are, and either executor resumes what the other began. Ray restarts an
    actor that dies, and its shard is encoded again.

    Attributes:
        make_encoder: Makes the document encoder, once in each actor.
        address: The cluster's, or "local" for one that is started here and ends with the call.
        actors: How many encode at once.
        threads: Processors of an actor without GPUs.
        gpus: GPUs of an actor, if the cluster has any.
        encoder_seconds: The mean time in which the encoder of an actor was running [s].
    """

    make_encoder: Callable[[], Encoder]
    batch_size: int
    _: KW_ONLY
    address: str = LOCAL
    actors: int = 1
    threads: int = 1
    gpus: int = 0
    encoder_seconds: float = field(default=0.0, init=False)

    def encode(self, shards: Iterator[Shard], report: Report) -> Iterator[Shard]:
        """Yields the shards in order, encoded; reports after each shard.

        Raises:
            CareError: If the encoder cannot be made or returns bad vectors, or actor after actor
                dies over a shard.
            ProviderError: If the cluster cannot be used.
        """
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
                self.encoder_seconds += seconds / self.actors
                report(shard, len(shard.new), shard.tokens)
                complete.add(shard.number)
                idle.append(actor)


@dataclass(frozen=True)
class RemoteEncoder:
    """The spec of a document encoder that only actors load; it encodes nothing itself."""

    spec: EncoderSpec

    def encode(self, texts: Sequence[str]) -> Encoding:
        """Raises ProviderError: the executor encodes, on other machines."""
        raise ProviderError("the document encoder is loaded by Ray's actors alone")


@contextmanager
def connected(address: str, processors: int) -> Generator[None]:
    """Connects to a cluster, or starts one that is as large as is asked for."""
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    alone = {
        "num_cpus": processors,
        "include_dashboard": False,
        "object_store_memory": _OBJECT_STORE_BYTES,
    }
    try:
        _check(address)
        _init(address, **(alone if address == LOCAL else {}))
    except (OSError, RuntimeError, ValueError) as error:
        message = f"no Ray cluster can be used at '{address}': {error}"
        raise ProviderError(message, code="ray_unavailable", address=address) from error
    try:
        yield
    finally:
        ray.shutdown()


def _init(address: str, **settings: Any) -> None:
    """Starts Ray or connects to it; tries again where a node never came up.

    Now and then a node never registers with the control service that was started with it. Ray
    gives it up after 30 seconds, with an exception of no class of its own.
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
            _log.warning("Ray's node did not come up: starting it again")


def _check(address: str) -> None:
    """Fails at once where nothing listens, which Ray goes on asking for many minutes."""
    host, _, port = address.rpartition("/")[2].rpartition(":")
    if port.isdecimal():
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()


def _result(reference: Any, shard: int) -> tuple[Shard, float]:
    """Returns the shard that an actor has encoded, and how long its encoder worked [s]."""
    try:
        made: tuple[Shard, float] | dict[str, Any] = ray.get(reference)
    except RayActorError as error:
        if "creation task" in str(error):
            raise _ended(error) from error
        raise ProviderError(
            f"{_ATTEMPTS} actors died one after the other over shard {shard}: Ray's logs say why; "
            "too little memory for a batch is the most common cause",
            code="workers_died",
            shard=shard,
        ) from error
    except RayError as error:
        raise _ended(error) from error
    if isinstance(made, dict):
        raise CareError(**made)
    return made


def _ended(error: RayError) -> ProviderError:
    reason = str(error).strip().splitlines()[-1]
    return ProviderError(f"Ray ended the encoding: {reason}", code="ray_failed")


class _Actor:
    """What runs in an actor: the local executor, on one shard after the other."""

    def __init__(self, make_encoder: Callable[[], Encoder], batch_size: int) -> None:
        self._make_encoder = make_encoder
        self._batch_size = batch_size
        self._encoder: Encoder | None = None

    def encode(self, shard: Shard) -> tuple[Shard, float] | dict[str, Any]:
        """Encodes a shard; an error is returned, which Ray would wrap in its own."""
        try:
            # Here and not when the actor starts: an actor that dies of it counts as an attempt.
            self._encoder = self._encoder or self._make_encoder()
            local = LocalExecutor(self._encoder, self._batch_size)
            # What Ray hands over cannot be written to.
            shard.vectors = shard.vectors.copy()
            (made,) = local.encode(iter([shard]), lambda *_: None)
            return made, local.encoder_seconds
        except CareError as error:
            return {"message": str(error), "code": error.code, **error.fields}
        except Exception as error:  # the boundary of the process
            _log.exception("encoding shard %d", shard.number)
            message = f"the encoder failed with {type(error).__name__}: {error}"
            return {"message": message, "code": "worker_failed", "shard": shard.number}
