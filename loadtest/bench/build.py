"""Builds with an encoder that costs next to nothing: what all the rest takes, and its memory.

python -m loadtest.bench.build --documents 100000 1000000 --out FOLDER

Each phase runs in a process of its own, so that its memory is its own: staging; encoding,
with reading and writing; the rest, from training to the published version. The last figures
are of the real encoder of a pair, on some documents: the share of the time in which it works.
"""

import argparse
import json
import logging
import random
import resource
import shutil
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np

from core.cpus import available_cpus
from core.types import EncoderSpec, Encoding, FloatArray
from indexer.build import BuildOptions, build, encode
from indexer.encoders import EncoderOptions, document_encoder
from loadtest.bench import environment, report
from models.pairs import DEFAULT_PAIR, load_pair

DIMENSION = 384
_LATENT = 12
_WORDS = 4000
_WORD_CHARS = (1, 3)
_TEXT_WORDS = (40, 160)
_LOG_FORMAT = "%(message)s"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure.

    Attributes:
        documents: Sizes of the corpora.
        factory: The index type, or None for the default of each size.
        memory_gib: What inverted lists in work may take [GiB].
        threads: Threads of FAISS and of the real encoder.
        batch_size: Texts in a batch of the null encoder.
        pair: The pair of the real encoder.
        real_documents: Documents that it encodes, or 0 to leave it out.
        cache: Where corpora and builds lie while they are measured.
        out: Where the results go.
    """

    documents: tuple[int, ...] = (100_000, 1_000_000)
    factory: str | None = None
    memory_gib: float = 0.25
    threads: int = 1
    batch_size: int = 1024
    pair: str = DEFAULT_PAIR
    real_documents: int = 300
    cache: Path = Path("builds/bench")
    out: Path = Path("loadtest/results")


class NullEncoder:
    """Hashes a text to a vector, a thousandth of a model's work; equal texts have equal ones.

    Vectors lie in 12 directions, so that graphs over them are searched like real ones.
    """

    concurrent_calls = 1

    def __init__(self) -> None:
        self.spec = EncoderSpec(
            model="null",
            revision="1",
            weights="none",
            weights_sha256="0" * 64,
            tokenizer="none",
            tokenizer_sha256="0" * 64,
            role="document",
            dimension=DIMENSION,
            native_dimension=DIMENSION,
            max_length=512,
            pooling="mean",
            normalize=True,
            prompt="",
            embedding_space="null-1",
        )
        generator = np.random.default_rng(0)
        self._table = generator.normal(size=(1 << 16, _LATENT)).astype(np.float32)
        self._directions = generator.normal(size=(_LATENT, DIMENSION)).astype(np.float32)

    def encode(self, texts: Sequence[str]) -> Encoding:
        """Encodes texts as one batch."""
        return self.encode_tokens(self.tokenize(texts))

    def tokenize(self, texts: Sequence[str]) -> list[bytes]:
        """Returns the bytes of texts."""
        return [text.encode() for text in texts]

    def encode_tokens(self, tokens: Sequence[bytes]) -> Encoding:
        """Encodes what `tokenize` returned."""
        hashes = np.array([zlib.crc32(text) for text in tokens], dtype=np.uint32)
        # Two of 65,536 points: four thousand million vectors.
        latent = self._table[hashes >> 16] + self._table[hashes & 0xFFFF]
        vectors: FloatArray = latent @ self._directions
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        return Encoding(
            vectors=vectors,
            token_counts=np.array([len(text) // 3 for text in tokens], dtype=np.int32),
            truncated=np.zeros(len(tokens), dtype=np.bool_),
        )


def run(options: Options) -> dict[str, Any]:
    """Measures and writes `build.json`, after each size; returns what it holds."""
    result: dict[str, Any] = {
        "benchmark": "build",
        "environment": environment.describe([]),
        "options": {
            "dimension": DIMENSION,
            "factory": options.factory,
            "memory_gib": options.memory_gib,
            "threads": options.threads,
            "batch_size": options.batch_size,
            "shard_size": BuildOptions("", "").shard_size,
        },
        "sizes": [],
    }
    path = options.out / report.BUILD_NAME
    for documents in options.documents:
        result["sizes"].append(measure(documents, options))
        report.write(result, path)
    if options.real_documents:
        result["encoder"] = _in_process(_encode_really, options)
        _log.info("%s", result["encoder"])
        report.write(result, path)
    return result


def measure(documents: int, options: Options) -> dict[str, Any]:
    """Builds an index of so many documents, phase by phase."""
    folder = options.cache / f"build-{documents}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    corpus = folder / "corpus.jsonl"
    write_corpus(corpus, documents)
    settings = BuildOptions(
        corpus=str(corpus),
        name="bench",
        indexes=folder / "indexes",
        builds=folder / "builds",
        factory=options.factory,
        recall=0.9,
        batch_size=options.batch_size,
        threads=options.threads,
        memory_gib=options.memory_gib,
        progress=False,
    )
    phases = {}
    for name, work in (("stage", _stage), ("encode", _encode), ("index", _build)):
        phases[name] = _in_process(work, settings)
        _log.info("%9d %-7s %s", documents, name, phases[name])
    found = {"documents": documents, "corpus_bytes": corpus.stat().st_size, "phases": phases}
    shutil.rmtree(folder)
    return found


def write_corpus(path: Path, documents: int) -> None:
    """Writes a corpus of random words; all texts differ."""
    chance = random.Random(0)
    words = [
        "".join(chr(chance.randint(0x4E00, 0x9FA5)) for _ in range(chance.randint(*_WORD_CHARS)))
        for _ in range(_WORDS)
    ]
    with path.open("w", encoding="utf-8") as file:
        for i in range(documents):
            record = {
                "_id": f"d{i:09d}",
                "title": f"第{i % 1000}讲",
                "text": "".join(chance.choices(words, k=chance.randint(*_TEXT_WORDS))),
                "metadata": {"department": words[i % 40], "year": 1990 + i % 35},
            }
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


class _Use:
    """Processor time of this process, and its most memory: in all, and without mapped files.

    Pages of files count as resident while there is room, and are given back when there is none.
    """

    def __init__(self) -> None:
        self._worked = time.process_time()
        self._end = Event()
        self._own = 0
        self._thread = Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._end.wait(0.05):
            status = Path("/proc/self/status").read_text()
            line = next(line for line in status.splitlines() if line.startswith("RssAnon"))
            self._own = max(self._own, int(line.split()[1]) * 1024)

    def end(self) -> dict[str, float]:
        """Ends the watch and returns the figures."""
        self._end.set()
        self._thread.join()
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {
            "processor_seconds": round(time.process_time() - self._worked, 1),
            "peak_own_bytes": self._own,
            "peak_resident_bytes": resident,
        }


class _StagedError(Exception):
    """The first batch is to be encoded."""


class _Stop(NullEncoder):
    def encode_tokens(self, tokens: Sequence[bytes]) -> Encoding:
        raise _StagedError


def _stage(settings: BuildOptions) -> dict[str, Any]:
    use, started = _Use(), time.perf_counter()
    with suppress(_StagedError):
        encode(settings, _Stop())
    return {"seconds": round(time.perf_counter() - started, 1), **use.end()}


def _encode(settings: BuildOptions) -> dict[str, Any]:
    use = _Use()
    summary = encode(settings, NullEncoder()).summary
    return {
        "seconds": round(summary.seconds, 1),
        "encoder_seconds": round(summary.encoder_seconds, 1),
        **use.end(),
    }


def _build(settings: BuildOptions) -> dict[str, Any]:
    use = _Use()
    manifest, _ = build(settings, NullEncoder(), NullEncoder())
    return {
        "seconds": round(manifest.build_seconds, 1),
        "factory": manifest.factory,
        "vectors_bytes": manifest.files["vectors.faiss"].bytes,
        "recall": round(manifest.recall.recall, 4),
        **use.end(),
    }


def _encode_really(options: Options) -> dict[str, Any]:
    folder = options.cache / "build-real"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_corpus(folder / "corpus.jsonl", options.real_documents)
    pair = load_pair(options.pair)
    settings = BuildOptions(
        corpus=str(folder / "corpus.jsonl"),
        name="bench",
        indexes=folder / "indexes",
        builds=folder / "builds",
        shard_size=max(options.real_documents // 4, 1),
        progress=False,
    )
    encoder = document_encoder(pair, EncoderOptions(threads=options.threads))
    summary = encode(settings, encoder).summary
    shutil.rmtree(folder)
    return {
        "pair": pair.name,
        "texts": summary.new_texts,
        "shards": 4,
        "tokens": summary.tokens,
        "seconds": round(summary.seconds, 2),
        "encoder_share": round(summary.encoder_seconds / summary.seconds, 4),
    }


def _in_process(work: Callable[..., Any], *arguments: Any) -> Any:
    log = partial(logging.basicConfig, level=_log.getEffectiveLevel(), format=_LOG_FORMAT)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=log) as pool:
        return pool.submit(work, *arguments).result()


def _options() -> Options:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    chosen = Options()
    add = parser.add_argument
    add("--documents", type=int, nargs="+", default=chosen.documents)
    add("--factory", help="index type (default: that of each size)")
    add("--memory-gib", type=float, default=chosen.memory_gib)
    add("--threads", type=int, default=available_cpus())
    add("--batch-size", type=int, default=chosen.batch_size)
    add("--pair", default=chosen.pair)
    add("--real-documents", type=int, default=chosen.real_documents)
    add("--cache", type=Path, default=chosen.cache)
    add("--out", type=Path, default=chosen.out)
    arguments = vars(parser.parse_args())
    arguments["documents"] = tuple(arguments["documents"])
    return Options(**arguments)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format=_LOG_FORMAT)
    run(_options())
