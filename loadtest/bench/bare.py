"""The same work without a server: tokenise, encode, search, in the fastest loop there is.

    python -m loadtest.bench.bare --task explore …    tries ways of looping, quickest first
    python -m loadtest.bench.bare --task sustain …    queries per second in one way
    python -m loadtest.bench.bare --task latency …    one query at a time

Prints JSON. It runs in a process of its own so that nothing of the harness takes part, and uses
tokenizers, ONNX Runtime and FAISS directly, with nothing of the service between them.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import onnxruntime as ort
from tokenizers import Tokenizer

from core.cpus import available_cpus
from core.text import normalize_text, with_prompt
from core.types import EncoderSpec, FloatArray
from core.versions import VECTORS, current_version, index_folder, read_manifest
from loadtest.queries import read_texts
from models.encoders.onnx import OUTPUT
from models.pairs import load_pair

BATCHES = (1, 2, 4, 8, 16, 32, 64)
_STRIDE = 3  # to tell ways apart, a third of the texts is enough
_FINALISTS = 4


@dataclass(frozen=True, slots=True)
class Way:
    """One way of looping.

    Attributes:
        batch: Queries that are encoded and searched at once.
        sessions: Threads that loop, each with a session of its own.
        threads: Threads inside one session.
        spinning: Whether those spin while they wait for work.
    """

    batch: int
    sessions: int
    threads: int
    spinning: bool


class Loop:
    """Tokenises, encodes and searches.

    Args:
        spec: The query encoder.
        folder: The folder that its paths are relative to.
        index: What is searched.
        top_k: Hits of each query.
        way: How; `sessions` of these loop side by side.
    """

    def __init__(
        self, spec: EncoderSpec, folder: Path, index: faiss.Index, top_k: int, way: Way
    ) -> None:
        self._prompt = spec.prompt
        self._dimension = spec.dimension
        self._index = index
        self._top_k = top_k
        self._threads = way.threads
        self._tokenizer = Tokenizer.from_file(str(folder / spec.tokenizer))
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(spec.max_length)
        self._tokenizer.encode_special_tokens = True
        options = ort.SessionOptions()
        options.intra_op_num_threads = way.threads
        options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", str(int(way.spinning)))
        self._session = ort.InferenceSession(
            str(folder / spec.weights), options, providers=["CPUExecutionProvider"]
        )

    def encode(self, texts: Sequence[str]) -> FloatArray:
        """Encodes texts as one batch: float32 [n, dimension], rows of unit norm."""
        tokens = self._tokenizer.encode_batch_fast(
            [with_prompt(self._prompt, normalize_text(text)) for text in texts]
        )
        ids = np.zeros((len(tokens), max(len(t) for t in tokens)), dtype=np.int64)
        mask = np.zeros_like(ids)
        for row, token in enumerate(tokens):
            ids[row, : len(token)] = token.ids
            mask[row, : len(token)] = 1
        vectors: FloatArray
        (vectors,) = self._session.run([OUTPUT], {"input_ids": ids, "attention_mask": mask})
        if vectors.shape[1] > self._dimension:
            vectors = np.ascontiguousarray(vectors[:, : self._dimension])
            vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors

    def search(self, texts: Sequence[str]) -> Any:
        """Encodes texts and searches with them: rows of hits, int64 [n, top_k]."""
        faiss.omp_set_num_threads(self._threads)
        return self._index.search(self.encode(texts), self._top_k)[1]


class Bench:
    """Ways of looping over the same texts with the same index.

    Args:
        options: The command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        pair = load_pair(options.pair)
        folder = index_folder(options.indexes, options.index)
        version = folder / current_version(options.indexes, options.index)
        index = faiss.read_index(str(version / VECTORS), faiss.IO_FLAG_MMAP_IFC)
        for name, value in read_manifest(version).search_parameters.items():
            faiss.ParameterSpace().set_index_parameter(index, name, value)
        self._spec, self._folder = pair.query, pair.folder
        self._index, self._top_k = index, options.top_k
        self.texts = read_texts(options.queries)

    def loop(self, way: Way) -> Loop:
        """A loop, warmed up."""
        loop = Loop(self._spec, self._folder, self._index, self._top_k, way)
        for batch in list(batches(self.texts, way.batch))[:3]:
            loop.search(batch)
        return loop

    def sustain(self, way: Way, seconds: float, stride: int = 1) -> float:
        """Queries per second over whole passes through the texts, sorted by length.

        Args:
            way: How to loop.
            seconds: Shortest time; the pass that it ends in is finished.
            stride: Every how manieth text is taken.
        """
        loops = [self.loop(way) for _ in range(way.sessions)]
        texts = sorted(self.texts, key=len, reverse=True)[::stride]
        work = list(batches(texts, way.batch))
        started = time.perf_counter()
        passes = 0
        with ThreadPoolExecutor(way.sessions) as threads:
            while time.perf_counter() - started < seconds or not passes:
                rest = iter(work)
                list(threads.map(_work, loops, repeat(rest)))
                passes += 1
            spent = time.perf_counter() - started
        return passes * len(texts) / spent

    def explore(self, seconds: float) -> list[dict[str, Any]]:
        """Measures all ways briefly and the quickest again for longer; the best comes first."""
        brief = {way: self.sustain(way, seconds, _STRIDE) for way in ways()}
        quickest = sorted(brief, key=lambda way: brief[way], reverse=True)
        longer = {way: self.sustain(way, 3 * seconds) for way in quickest[:_FINALISTS]}
        order = sorted(longer, key=lambda way: longer[way], reverse=True) + quickest[_FINALISTS:]
        return [asdict(way) | {"qps": longer.get(way, brief[way])} for way in order]

    def latency(self, way: Way, seconds: float) -> dict[str, float]:
        """Percentiles of single queries in their order [ms], over whole passes."""
        loop = self.loop(way)
        end = time.perf_counter() + seconds
        spent: list[float] = []
        while not spent or time.perf_counter() < end:
            for text in self.texts:
                before = time.perf_counter()
                loop.search([text])
                spent.append(time.perf_counter() - before)
        p50, p99 = 1000 * np.quantile(spent, [0.5, 0.99], method="inverted_cdf")
        return {"p50_ms": float(p50), "p99_ms": float(p99), "requests": len(spent)}


def ways() -> list[Way]:
    """What is tried: one session over all processors, or a session for each processor."""
    cpus = available_cpus()
    shapes = [(1, cpus, False), (1, cpus, True), (cpus, 1, False)]
    if cpus == 1:
        shapes = shapes[:1]
    return [Way(batch, *shape) for shape in shapes for batch in BATCHES]


def batches(texts: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    """Cuts texts into batches, in their order."""
    return (texts[at : at + size] for at in range(0, len(texts), size))


def _work(loop: Loop, rest: Iterator[Sequence[str]]) -> None:
    for batch in rest:  # taking the next from a list's iterator is atomic
        loop.search(batch)


def main() -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench.bare")
    add = parser.add_argument
    add("--task", choices=["explore", "sustain", "latency"], required=True)
    add("--indexes", type=Path, required=True)
    add("--index", required=True)
    add("--pair", required=True)
    add("--queries", type=Path, required=True)
    add("--top-k", type=int, required=True)
    add("--seconds", type=float, required=True)
    add("--way", help="JSON of the way, for sustain and latency")
    options = parser.parse_args()
    bench = Bench(options)
    result: Any
    if options.task == "explore":
        result = bench.explore(options.seconds)
    else:
        way = Way(**json.loads(options.way))
        if options.task == "sustain":
            result = {"qps": bench.sustain(way, options.seconds)}
        else:
            result = bench.latency(way, options.seconds)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
