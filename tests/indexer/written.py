"""What writes and merges write to disk, by file, as multiples of the bytes of the documents.

`python -m tests.indexer.written` prints a row for each size of documents and of requests. Vectors
are random, so that they compress like those of `care-mini`. Texts are of departments of data/sample
that the dictionary of packs has nothing of.
"""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from core.encoders import Encoding, Role
from core.writes import Write, Written
from indexer.build import build
from indexer.live.index import LiveIndex
from tests.conftest import SAMPLE, write_jsonl
from tests.encoders import make_spec
from tests.indexer.builds import build_options

_DIMENSION, _BASE = 384, 2_000
# Bytes of a document, documents of a request, and requests.
_CASES = ((490, 1, 64), (490, 1, 512), (1_880, 1, 64), (490, 1_000, 7), (1_880, 1_000, 7))
_LINES = [json.loads(line) for line in (SAMPLE / "corpus.jsonl").read_text("utf-8").splitlines()]
_OTHERS = sorted({one["metadata"]["department"] for one in _LINES})[1::2]
_RECORDS = [one for one in _LINES if one["metadata"]["department"] in _OTHERS]
_TEXT = "".join(one["text"] for one in _RECORDS)


class RandomEncoder:
    """Returns the same random vector for the same text."""

    def __init__(self, role: Role) -> None:
        sizes = {"dimension": _DIMENSION, "native_dimension": _DIMENSION}
        self.spec = make_spec(role).model_copy(update=sizes)

    def encode(self, texts: Sequence[str]) -> Encoding:
        seeds = (list(hashlib.sha256(text.encode()).digest()) for text in texts)
        drawn = [np.random.default_rng(seed).standard_normal(_DIMENSION) for seed in seeds]
        vectors = np.array(drawn, np.float32)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        some = np.zeros(len(texts), np.int32)
        return Encoding(vectors, some, some.astype(np.bool_))


def record(number: int, size: int) -> dict[str, Any]:
    """Returns a document of about `size` bytes as JSON."""
    like, length = _RECORDS[number % len(_RECORDS)], (size - 130) // 3
    start = Random(number).randrange(len(_TEXT) - length)
    title, text = f"{like['title']} {number}", _TEXT[start : start + length]
    return {"_id": f"d{number}", "title": title, "text": text, "metadata": like["metadata"]}


def new_bytes(folder: Path, seen: set[tuple[int, int]]) -> Counter[str]:
    """Returns the sizes of the files that are not `seen`, by name, and adds them to it."""
    sizes: Counter[str] = Counter()
    for path in folder.rglob("*"):
        facts = path.stat()
        key = facts.st_ino, facts.st_mtime_ns
        if path.is_file() and not path.name.startswith(".") and key not in seen:
            name = path.parent.name + "/" if path.parent.name == "lexical" else path.name
            sizes[name] += facts.st_size
            seen.add(key)
    return sizes


def measure(size: int, batch: int, requests: int) -> None:
    """Prints what requests of so many documents, and the merges after them, write."""
    with TemporaryDirectory() as folder:
        numbers = count()
        corpus = write_jsonl(
            Path(folder, "corpus.jsonl"), [record(next(numbers), size) for _ in range(_BASE)]
        )
        options = build_options(Path(folder), corpus)
        build(options, RandomEncoder("document"), RandomEncoder("query"))
        index = options.index
        live = LiveIndex(index, RandomEncoder("document"))
        seen: set[tuple[int, int]] = set()
        new_bytes(index.path, seen)
        written, merged, given, times = Counter[str](), Counter[str](), 0, []
        for _ in range(requests):
            put = [record(next(numbers), size) for _ in range(batch)]
            given += sum(len(json.dumps(one, ensure_ascii=False).encode()) for one in put)
            started = time.perf_counter()
            (result,) = live.commit([Write("test", put=tuple(put))])
            times.append(1000 * (time.perf_counter() - started))
            assert isinstance(result, Written)
            written += new_bytes(index.path, seen)
            live.merge()
            merged += new_bytes(index.path, seen)
    both = sum((written + merged).values()) / given
    print(
        f"{given / batch / requests:,.0f} bytes, {requests} requests of {batch:,}: {both:.1f} ×, "
        f"writes {sum(written.values()) / given:.1f} "
        f"({', '.join(f'{name} {n / given:.2f}' for name, n in written.most_common(6))}), "
        f"merges {sum(merged.values()) / given:.1f}; p50 of a commit {np.median(times):.0f} ms"
    )


if __name__ == "__main__":
    for case in _CASES:
        measure(*case)
