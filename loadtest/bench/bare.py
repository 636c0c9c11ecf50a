"""The bare loop: the service's work without a server, as an upper bound of its throughput.

The loop tokenizes, encodes and searches, directly with tokenizers, ONNX Runtime and FAISS. Run
`explore`, `sustain` and `latency` in a new process, so that the benchmark's other threads do not
affect them.
"""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import repeat
from typing import Any

import faiss
import numpy as np
import onnxruntime as ort
from tokenizers import Tokenizer

from core.encoders import Pair
from core.machine import available_cpus
from core.manifest import VECTORS_FILE
from core.text import normalize_text, with_prompt
from core.types import FloatArray
from core.versions import IndexFolder, read_manifest
from loadtest.bench.options import ServiceOptions
from loadtest.traffic import read_texts
from models.encoders.onnx import OUTPUT
from models.pairs import load_pair

BATCHES = (1, 2, 4, 8, 16, 32, 64)
_FINALISTS = 4


@dataclass(frozen=True, slots=True)
class LoopConfig:
    """A configuration of the loop.

    Attributes:
        batch: Queries per batch.
        sessions: Threads that run the loop, each with a separate ONNX Runtime session.
        threads: Threads of each session.
        spinning: Whether the threads of a session spin while they wait.
    """

    batch: int
    sessions: int
    threads: int
    spinning: bool


def loop_configs() -> list[LoopConfig]:
    """Returns the configurations to try: one session on all CPUs, or one session per CPU."""
    cpus = available_cpus()
    shapes = {(1, cpus, False), (1, cpus, cpus > 1), (cpus, 1, False)}
    return [LoopConfig(batch, *shape) for shape in sorted(shapes) for batch in BATCHES]


def explore(options: ServiceOptions) -> list[dict[str, Any]]:
    """Measures all configurations for one second, and the four fastest again for three.

    Returns the configurations with their `qps` [queries/s], the fastest first.
    """
    # A third of the texts is enough to compare configurations.
    speed = {config: sustain(options, config, 1, stride=3) for config in loop_configs()}
    ranked = sorted(speed, key=lambda config: speed[config], reverse=True)
    best, rest = ranked[:_FINALISTS], ranked[_FINALISTS:]
    speed |= {config: sustain(options, config, 3) for config in best}
    best.sort(key=lambda config: speed[config], reverse=True)
    return [asdict(config) | {"qps": speed[config]} for config in best + rest]


def sustain(options: ServiceOptions, config: LoopConfig, seconds: float, stride: int = 1) -> float:
    """Returns queries per second over complete passes through the texts, sorted by length.

    The last pass is completed even if it takes longer than `seconds`. Only every `stride`-th text
    is used.
    """
    texts = sorted(read_texts(options.queries), key=len, reverse=True)[::stride]
    work = [texts[at : at + config.batch] for at in range(0, len(texts), config.batch)]
    loops = [_warm_loop(options, config, work) for _ in range(config.sessions)]
    started = time.perf_counter()
    passes = 0
    with ThreadPoolExecutor(config.sessions) as threads:
        while time.perf_counter() - started < seconds or not passes:
            list(threads.map(_work, loops, repeat(iter(work))))
            passes += 1
        spent = time.perf_counter() - started
    return passes * len(texts) / spent


def latency(options: ServiceOptions, config: LoopConfig, seconds: float) -> dict[str, float]:
    """Returns latency percentiles [ms] of single queries over complete passes."""
    work = [[text] for text in read_texts(options.queries)]
    loop = _warm_loop(options, config, work)
    end = time.perf_counter() + seconds
    spent: list[float] = []
    while not spent or time.perf_counter() < end:
        for batch in work:
            before = time.perf_counter()
            loop.search(batch)
            spent.append(time.perf_counter() - before)
    p50, p99 = 1000 * np.percentile(spent, [50, 99], method="inverted_cdf")
    return {"p50_ms": float(p50), "p99_ms": float(p99), "requests": len(spent)}


class Loop:
    """Tokenizes queries, encodes them with a pair's query side, and searches for `top_k` hits."""

    def __init__(self, pair: Pair, index: faiss.Index, top_k: int, config: LoopConfig) -> None:
        self._spec = pair.query
        self._index = index
        self._top_k = top_k
        self._threads = config.threads
        self._tokenizer = Tokenizer.from_file(str(pair.folder / pair.query.tokenizer))
        self._tokenizer.enable_padding()
        self._tokenizer.enable_truncation(pair.query.max_length)
        self._tokenizer.encode_special_tokens = True
        settings = ort.SessionOptions()
        settings.intra_op_num_threads = config.threads
        settings.inter_op_num_threads = 1
        spinning = str(int(config.spinning))
        settings.add_session_config_entry("session.intra_op.allow_spinning", spinning)
        weights = str(pair.folder / pair.query.weights)
        self._session = ort.InferenceSession(weights, settings, ["CPUExecutionProvider"])

    def encode(self, texts: Sequence[str]) -> FloatArray:
        """Encodes texts as one batch; returns float32 [n, dimension] of unit norm."""
        tokens = self._tokenizer.encode_batch_fast(
            [with_prompt(self._spec.prompt, normalize_text(text)) for text in texts]
        )
        ids = np.array([token.ids for token in tokens], dtype=np.int64)
        mask = np.array([token.attention_mask for token in tokens], dtype=np.int64)
        vectors: FloatArray
        (vectors,) = self._session.run([OUTPUT], {"input_ids": ids, "attention_mask": mask})
        if vectors.shape[1] > self._spec.dimension:
            vectors = np.ascontiguousarray(vectors[:, : self._spec.dimension])
            vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors

    def search(self, texts: Sequence[str]) -> Any:
        """Encodes texts and searches; returns the rows of hits, int64 [n, top_k]."""
        faiss.omp_set_num_threads(self._threads)
        return self._index.search(self.encode(texts), self._top_k)[1]


def _warm_loop(options: ServiceOptions, config: LoopConfig, work: Sequence[Sequence[str]]) -> Loop:
    pair = load_pair(options.pair)
    folder = IndexFolder(options.indexes, options.index).path
    version = folder / IndexFolder(options.indexes, options.index).active()
    index = faiss.read_index(str(version / VECTORS_FILE), faiss.IO_FLAG_MMAP_IFC)
    for name, value in read_manifest(version).search_parameters.items():
        faiss.ParameterSpace().set_index_parameter(index, name, value)
    loop = Loop(pair, index, options.top_k, config)
    for batch in work[:3]:
        loop.search(batch)
    return loop


def _work(loop: Loop, batches: Iterator[Sequence[str]]) -> None:
    for batch in batches:  # threads share the iterator; advancing a list iterator is atomic
        loop.search(batch)
