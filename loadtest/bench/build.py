"""Time and memory of index builds with a null encoder, that is, of everything except encoding.

Each phase runs in a separate process, to measure its memory: staging; encoding, with reading and
writing; and the rest, from training the index to publishing the version. The last measurement is
the share of time that a pair's real encoder computes during the encoding phase, on some documents.
"""

import logging
import random
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from core.encoders import Encoding
from core.manifest import VECTORS_FILE
from core.records import write_jsonl
from core.types import FloatArray
from indexer.build import BuildOptions, build, encode
from loadtest.bench import results
from loadtest.bench.options import BuildBenchOptions
from loadtest.bench.processes import profiled, run_in_new_process
from models.encoders.factory import EncoderOptions, document_encoder
from models.pairs import DEFAULT_PAIR, load_pair

_LATENT = 12
_WORDS = 4000
_WORD_CHARS = (1, 3)
_TEXT_WORDS = (40, 160)
_REAL_SHARDS = 4

_log = logging.getLogger(__name__)


class NullEncoder:
    """Computes vectors by hashing, a thousand times faster than a model.

    Equal texts have equal vectors. The vectors lie in a subspace of 12 dimensions, so that graphs
    over them behave as with real embeddings.
    """

    concurrent_calls = 1

    def __init__(self) -> None:
        facts = {"model": "null", "prompt": "", "embedding_space": "null-1"}
        self.spec = load_pair(DEFAULT_PAIR).document.model_copy(update=facts)
        generator = np.random.default_rng(0)
        self._table = generator.normal(size=(1 << 16, _LATENT)).astype(np.float32)
        directions = generator.normal(size=(_LATENT, self.spec.dimension))
        self._directions = directions.astype(np.float32)

    def encode(self, texts: Sequence[str]) -> Encoding:
        """Encodes texts as one batch."""
        return self.encode_tokens(self.tokenize(texts))

    def tokenize(self, texts: Sequence[str]) -> list[bytes]:
        """Returns the texts as bytes."""
        return [text.encode() for text in texts]

    def encode_tokens(self, tokens: Sequence[bytes]) -> Encoding:
        """Encodes the result of `tokenize`."""
        hashes = np.array([zlib.crc32(text) for text in tokens], dtype=np.uint32)
        # The sum of two of 65,536 points gives 2³² different vectors.
        latent = self._table[hashes >> 16] + self._table[hashes & 0xFFFF]
        vectors: FloatArray = latent @ self._directions
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        counts = np.array([len(text) // 3 for text in tokens], dtype=np.int32)
        return Encoding(vectors, counts, np.zeros(len(tokens), dtype=np.bool_))


class _StagedError(Exception):
    """Raised at the first batch, to stop a build after staging."""


class _StagingOnlyEncoder(NullEncoder):
    def encode_tokens(self, tokens: Sequence[bytes]) -> Encoding:
        raise _StagedError


def run(options: BuildBenchOptions) -> None:
    """Measures all sizes and writes `build.json` after each."""
    names = ("factory", "memory_gib", "threads", "batch_size")
    chosen = {name: getattr(options, name) for name in names}
    dimension, shard_size = NullEncoder().spec.dimension, BuildOptions("", "").shard_size
    result: dict[str, Any] = {
        "benchmark": "build",
        "environment": results.describe(),
        "options": chosen | {"dimension": dimension, "shard_size": shard_size},
        "sizes": [],
    }
    path = options.out / results.BUILD_NAME
    for documents in options.documents:
        result["sizes"].append(measure(documents, options.cache, **chosen))
        results.write(result, path)
    if options.real_documents:
        result["encoder"] = _measure_encoder(options)
        _log.info("%s", result["encoder"])
        results.write(result, path)


def measure(documents: int, cache: Path, **chosen: Any) -> dict[str, Any]:
    """Builds an index of some documents and measures each phase."""
    phases = {}
    with _settings(cache, documents, recall=0.9, **chosen) as settings:
        for name, phase in (("stage", _stage), ("encode", _encode), ("index", _build)):
            phases[name] = run_in_new_process(profiled, phase, settings)
            _log.info("%9d %-7s %s", documents, name, phases[name])
        size = Path(settings.corpus).stat().st_size
    return {"documents": documents, "corpus_bytes": size, "phases": phases}


def write_corpus(path: Path, documents: int) -> None:
    """Writes a corpus of distinct texts of random words."""
    chance = random.Random(0)
    words = [
        "".join(chr(chance.randint(0x4E00, 0x9FA5)) for _ in range(chance.randint(*_WORD_CHARS)))
        for _ in range(_WORDS)
    ]
    records = (
        {
            "_id": f"d{i:09d}",
            "title": f"第{i % 1000}讲",
            "text": "".join(chance.choices(words, k=chance.randint(*_TEXT_WORDS))),
            "metadata": {"department": words[i % 40], "year": 1990 + i % 35},
        }
        for i in range(documents)
    )
    write_jsonl(path, records)


@contextmanager
def _settings(cache: Path, documents: int, **chosen: Any) -> Iterator[BuildOptions]:
    """Yields build options for a temporary folder with a corpus."""
    cache.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=cache, prefix="build-") as name:
        folder = Path(name)
        corpus, folders = folder / "corpus.jsonl", (folder / "indexes", folder / "builds")
        write_corpus(corpus, documents)
        yield BuildOptions(str(corpus), "bench", *folders, progress=False, **chosen)


def _stage(settings: BuildOptions) -> dict[str, Any]:
    with suppress(_StagedError):
        encode(settings, _StagingOnlyEncoder())
    return {}


def _encode(settings: BuildOptions) -> dict[str, Any]:
    summary = encode(settings, NullEncoder()).summary
    spent = {"seconds": summary.seconds, "encoder_seconds": summary.encoder_seconds}
    return {name: round(seconds, 1) for name, seconds in spent.items()}


def _build(settings: BuildOptions) -> dict[str, Any]:
    manifest, _ = build(settings, NullEncoder(), NullEncoder())
    return {
        "seconds": round(manifest.build_seconds, 1),
        "factory": manifest.factory,
        "vectors_bytes": manifest.files[VECTORS_FILE].bytes,
        "recall": round(manifest.recall.recall, 4),
    }


def _measure_encoder(options: BuildBenchOptions) -> dict[str, Any]:
    pair = load_pair(options.pair)
    encoder = document_encoder(pair, EncoderOptions(threads=options.threads))
    shard_size = max(options.real_documents // _REAL_SHARDS, 1)
    with _settings(options.cache, options.real_documents, shard_size=shard_size) as settings:
        summary = encode(settings, encoder).summary
    return {
        "pair": pair.name,
        "texts": summary.new_texts,
        "shards": _REAL_SHARDS,
        "tokens": summary.tokens,
        "seconds": round(summary.seconds, 2),
        "encoder_share": round(summary.encoder_seconds / summary.seconds, 4),
    }
