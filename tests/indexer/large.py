"""Indexes of care-mini with as many documents as are wanted, in minutes instead of days.

`python -m tests.indexer.large FOLDER --corpus corpus.jsonl --documents 100000` builds the index
`large-100000` in FOLDER/indexes by `care index`. Documents are those of the corpus with numbers in
their titles; their vectors are those of some of its texts with noise. What is encoded alone, such
as the texts that a service compares its encoders by, has its own vector.

`python -m tests.indexer.large FOLDER --update large-100000` adds a document by `care update`, and
prints time, bytes and flushes of that, which strace counts. `--documents 1000 --many 500` copies
`large-1000` as often with ten segments, and searches in all copies.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from unittest.mock import patch

import numpy as np

from care.cli.main import main as care
from core.encoders import Encoder, Encoding
from core.service_process import start_service
from core.text import document_text
from core.types import FloatArray
from core.versions import IndexFolder, write_manifest
from core.writes import Write
from indexer.live.index import LiveIndex
from indexer.publication import IndexWriter
from indexer.update import active_manifest
from loadtest.live_writes import Connection, copy_index, quantiles
from loadtest.traffic import read_texts
from models.encoders.factory import EncoderOptions, document_encoder
from models.pairs import load_pair
from tests.conftest import write_jsonl
from tests.indexer.written import new_bytes

_ENCODED, _NOISE = 512, 0.03


class MadeUpEncoder:
    """Returns the vector of a known text with noise for each text that is not asked for alone."""

    def __init__(self, encoder: Encoder, known: FloatArray) -> None:
        self.spec = encoder.spec
        self._encoder, self._known = encoder, known
        self._noise = _NOISE * np.random.default_rng(1).standard_normal(1 << 22, np.float32)
        self._alone: dict[str, FloatArray] = {}

    def encode(self, texts: Sequence[str]) -> Encoding:
        if len(texts) == 1:
            self._alone[texts[0]] = self._encoder.encode(texts).vectors[0]
        vectors = np.array([self._alone.get(text, self._made_up(text)) for text in texts])
        some = np.zeros(len(texts), np.int32)
        return Encoding(vectors, some, some.astype(np.bool_))

    def _made_up(self, text: str) -> FloatArray:
        drawn = int.from_bytes(hashlib.sha256(text.encode()).digest())
        start = drawn % (len(self._noise) - self.spec.dimension)
        noise = self._noise[start : start + self.spec.dimension]
        vector = self._known[(drawn >> 64) % len(self._known)] + noise
        return np.asarray(vector / np.linalg.norm(vector), np.float32)


def make(folder: Path, corpus: Path, count: int, length: int | None, options: list[str]) -> str:
    """Builds an index of `count` documents like those of a corpus; returns its name.

    `length` is the most characters of a text.
    """
    name, records = f"large-{count}", [json.loads(line) for line in corpus.open(encoding="utf-8")]
    encoder = document_encoder(load_pair("care-mini"), EncoderOptions(threads=1))
    kept = folder / "encoded.npy"
    if not kept.exists():
        texts = [document_text(one["title"], one["text"]) for one in records[:_ENCODED]]
        np.save(kept, np.concatenate([encoder.encode([text]).vectors for text in texts]))
    with (folder / "corpus.jsonl").open("w", encoding="utf-8") as file:
        for number, one in enumerate(islice(cycle(records), count)):
            made = one | {"_id": f"d{number}", "title": f"{one['title']} {number}"}
            made["text"] = one["text"][:length]
            file.write(json.dumps(made, ensure_ascii=False) + "\n")
    with patch("care.indexing.document_encoder", lambda *_: MadeUpEncoder(encoder, np.load(kept))):
        given = ["index", str(folder / "corpus.jsonl"), "--index", name, *_folders(folder)]
        assert care([*given, *options]) == 0
    return name


def update(folder: Path, name: str) -> None:
    """Adds a document by a command, and prints what that takes."""
    added = {"_id": f"n{time.time_ns()}", "text": f"术后第{time.time_ns() % 10**9}天可下床活动。"}
    write_jsonl(folder / "added.jsonl", [added])
    seen: set[tuple[int, int]] = set()
    new_bytes(folder / "indexes" / name, seen)
    command = [sys.executable, "-m", "care", "update", "--index", name, *_folders(folder)]
    command += ["--add", str(folder / "added.jsonl")]
    calls = folder / "calls"
    started = time.perf_counter()
    subprocess.run(
        [
            "strace",
            "-f",
            "--seccomp-bpf",
            "-qqy",
            "-e",
            "trace=fsync,fdatasync",
            "-o",
            str(calls),
            *command,
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    seconds = time.perf_counter() - started
    # Not those of files in memory.
    flushes = len(re.findall(r"(?:fsync|fdatasync)\(\d+<(?!/dev/shm)", calls.read_text()))
    size = sum(new_bytes(folder / "indexes" / name, seen).values())
    print(f"{name}: 1 document in {seconds:.1f} s, {size:,} bytes, {flushes} flushes")


def many(folder: Path, name: str, count: int, queries: Path) -> None:
    """Makes copies of an index with nine writes each, and searches in each of them."""
    root, encoder = folder / "indexes", document_encoder(load_pair("care-mini"), EncoderOptions())
    copy_index(IndexFolder(root, name), f"{name}-ten")
    index = IndexWriter(root, f"{name}-ten")
    live = LiveIndex(index, encoder)
    while len(active_manifest(index).segments) < 10:
        write = Write(index.name, put=({"_id": f"n{time.time_ns()}", "text": "术后可下床活动。"},))
        live.commit([write])
    manifest = active_manifest(index)
    for number in range(count):
        copy = IndexFolder(root, f"{name}-{number:04}")
        if not copy.path.exists():
            shutil.copytree(index.path, copy.path, copy_function=os.link)
            named = manifest.model_copy(update={"name": copy.name})
            write_manifest(copy.version(manifest.version), named)
    texts = read_texts(queries)
    with start_service(root, name, {"CACHE_ENTRIES": "0"}) as service:
        connection, process = Connection(service.url), Path(f"/proc/{service.process.pid}")
        for round_ in ("first", "second", "third"):
            names = [f"{name}-{number:04}" for number in range(count)]
            if round_ == "third":
                names = names[-20:] * (count // 20)
            asked = zip(names, cycle(texts), strict=False)
            times = [
                connection.ask("POST", f"/indexes/{one}/search", {"query": text})[0]
                for one, text in asked
            ]
            maps = len((process / "maps").read_text().splitlines())
            (private,) = re.findall(r"Pss_Anon: +(\d+)", (process / "smaps_rollup").read_text())
            files = len(list((process / "fd").iterdir()))
            print(
                f"{round_} search in {len(set(names))} indexes: {quantiles(times)}; "
                f"{int(private) / 1024:.0f} MB private, {maps:,} maps, {files:,} open files"
            )


def _folders(folder: Path) -> list[str]:
    return ["--indexes", str(folder / "indexes"), "--builds", str(folder / "builds")]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--corpus", type=Path, help="JSONL with title and text")
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--factory", action="append", default=[], help="as of care index")
    parser.add_argument("--length", type=int, help="most characters of a text")
    parser.add_argument("--many", type=int, default=0, help="number of copies of ten segments")
    parser.add_argument("--queries", type=Path, help="JSONL with text")
    parser.add_argument("--update", nargs="*", default=[], metavar="NAME")
    chosen = parser.parse_args()
    if chosen.corpus:
        options = [word for factory in chosen.factory for word in ("--factory", factory)]
        print(make(chosen.folder, chosen.corpus, chosen.documents, chosen.length, options))
    for index in chosen.update:
        update(chosen.folder, index)
    if chosen.many:
        many(chosen.folder, f"large-{chosen.documents}", chosen.many, chosen.queries)
