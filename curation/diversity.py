"""The diversity filter: drops near-duplicate texts."""

import json
import resource
import sys
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, cast

import faiss
import numpy as np
from numpy.typing import NDArray

from core.encoders import Role
from core.errors import CareError, DataError
from core.files import atomic, sha256_file
from core.progress import progress_bar
from core.records import read_jsonl, string, write_json, write_jsonl
from core.rows import Rows, Texts, offsets_of
from core.scratch import scratch
from core.text import document_text
from core.types import FloatArray, RowArray
from curation.common import CACHE, output_folder
from evaluation.dense import encode
from models.pairs import DEFAULT_PAIR, load_pair

_HNSW_LINKS = 32
_EF_CONSTRUCTION = 64
_EF_SEARCH = 64

Kind = Literal["queries", "documents"]


@dataclass(frozen=True, slots=True)
class DiversityRule:
    """Drops a text if more than `near` of its `k` nearest kept texts have a cosine above `t`."""

    k: int
    t: float  # cosine similarity
    near: int

    def __post_init__(self) -> None:
        if not 0 <= self.near < self.k:
            message = (
                f"n must be at least 0 and less than k, but n is {self.near} and k is {self.k}"
            )
            raise CareError(message, code="bad_rule", k=self.k, n=self.near)


# The thresholds t of pairs. Those of gte-multilingual-base are the paper's (Table 10). Those of
# care-mini are `distinct_threshold` of the queries and of the corpus of data/sample, rounded up.
THRESHOLDS: dict[str, dict[Kind, float]] = {
    "gte-multilingual-base": {"queries": 0.85, "documents": 0.78},
    "care-mini": {"queries": 0.90, "documents": 0.91},
}
# Of texts that are known to differ, the share without a neighbour above the threshold.
_DISTINCT = 0.95


def distinct_threshold(vectors: FloatArray) -> float:
    """Returns a threshold t for an encoder, from vectors of texts that are known to differ.

    95 % of these texts have no other one with a cosine above t. `vectors` are float32
    [n, dimension], n at least 2.
    """
    index = GrowingIndex(vectors.shape[1], len(vectors))
    unit = _unit(vectors)
    index.add(unit)
    # The nearest of each text is the text itself.
    return float(np.quantile(index.search(unit, 2)[:, 1], _DISTINCT))


@dataclass(frozen=True, slots=True)
class DiversityOptions:
    """Options of the filter; each can change which texts are kept."""

    # Texts that are kept without a check and start the index; None for 5,000, the paper's number,
    # or a tenth of all texts if that is less.
    seeds: int | None = None
    seed: int = 0  # of the random choice of these texts
    flat_limit: int = 100_000  # kept texts up to which the search is exact
    # Texts per search. Within a block the rule is applied to one text after the other, so that
    # exact search keeps the same texts as a block of 1.
    block: int = 512


@dataclass(frozen=True, slots=True)
class Diversified:
    """The texts that are kept, bool [n], and the type of the index at the end."""

    kept: NDArray[np.bool_]
    index: str


def diversify(
    vectors: FloatArray,
    rule: DiversityRule,
    options: DiversityOptions | None = None,
    threads: int = 1,
    checkpoint: Path | None = None,
    checkpoint_seconds: float = 30.0,
) -> Diversified:
    """Applies the rule to one text after the other: the seeds first, then the others in order.

    The result does not depend on the number of threads. An interrupted call resumes from
    `checkpoint`: it builds the index from the saved decisions, without searching again.

    Args:
        vectors: float32 [n, dimension], in memory or memory-mapped; they are scaled to unit norm.
        checkpoint: File in which decisions are saved; it is removed at the end.
        checkpoint_seconds: The least time between two saves [s].
    """
    options = options or DiversityOptions()
    order = _order(len(vectors), options)
    first = _seeds(len(order), options)
    kept = np.zeros(len(order), dtype=np.bool_)
    kept[:first] = True
    identity = json.dumps([list(vectors.shape), asdict(rule), asdict(options)])
    done = _read_checkpoint(checkpoint, identity, kept)
    index = GrowingIndex(vectors.shape[1], options.flat_limit, threads)
    saved = time.monotonic()
    with progress_bar("diversify", total=len(order), unit="texts") as progress:
        for start in range(0, len(order), options.block):
            part = slice(start, min(start + options.block, len(order)))
            block = _unit(vectors[order[part]])
            if part.stop > done and part.stop > first:
                near = (index.search(block, rule.k) > rule.t).sum(axis=1)
                closer = block @ block.T > rule.t
                chosen = kept[part]
                # More than `near` of the k nearest are above t if and only if more than `near` of
                # all are, because near < k. So counts from the index and the block are added.
                for at in range(max(0, first - start), len(block)):
                    inside = np.count_nonzero(closer[at, :at] & chosen[:at])
                    chosen[at] = near[at] + inside <= rule.near
            index.add(block[kept[part]])
            progress.update(len(block))
            due = time.monotonic() - saved > checkpoint_seconds
            if checkpoint and due and part.stop > done:
                with atomic(checkpoint) as temporary, temporary.open("wb") as file:
                    bits = np.packbits(kept[: part.stop])
                    np.savez(file, identity=identity, done=part.stop, kept=bits)
                saved = time.monotonic()
    if checkpoint:
        checkpoint.unlink(missing_ok=True)
    result = np.zeros(len(order), dtype=np.bool_)
    result[order] = kept
    return Diversified(result, index.kind)


def _order(count: int, options: DiversityOptions) -> RowArray:
    """Returns all rows: first the seeds, then the others, each in ascending order."""
    shuffled = np.random.default_rng(options.seed).permutation(count)
    seeds, others = np.split(shuffled, [_seeds(count, options)])
    return np.concatenate([np.sort(seeds), np.sort(others)])


def _seeds(count: int, options: DiversityOptions) -> int:
    return min(5000, count // 10) if options.seeds is None else min(options.seeds, count)


def _unit(vectors: FloatArray) -> FloatArray:
    vectors = np.asarray(vectors, dtype=np.float32)
    unit: FloatArray = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return unit


def _read_checkpoint(path: Path | None, identity: str, kept: NDArray[np.bool_]) -> int:
    """Fills `kept` with the saved decisions and returns their number."""
    if not path or not path.is_file():
        return 0
    with np.load(path, allow_pickle=False) as saved:
        if str(saved["identity"]) != identity:
            reason = "was written with another rule, options or texts: delete it to start again"
            raise CareError.at(path, reason, "other_checkpoint")
        done = int(saved["done"])
        kept[:done] = np.unpackbits(saved["kept"], count=done).astype(np.bool_)
    return done


class GrowingIndex:
    """An index of unit vectors by inner product: Flat up to `flat_limit` vectors, then HNSW.

    Flat is exact; HNSW is approximate. Vectors are added by one thread, so that the graph depends
    on their order alone.
    """

    def __init__(self, dimension: int, flat_limit: int, threads: int = 1) -> None:
        self._flat_limit = flat_limit
        self._threads = threads
        faiss.omp_set_num_threads(threads)
        self._index: faiss.Index = faiss.IndexFlatIP(dimension)

    def __len__(self) -> int:
        return int(self._index.ntotal)

    @property
    def kind(self) -> str:
        """Flat or HNSW."""
        return "Flat" if isinstance(self._index, faiss.IndexFlatIP) else f"HNSW{_HNSW_LINKS}"

    def add(self, vectors: FloatArray) -> None:
        """Appends unit vectors, float32 [n, dimension]."""
        if self.kind == "Flat" and len(self) + len(vectors) > self._flat_limit:
            flat = self._index
            self._index = faiss.IndexHNSWFlat(flat.d, _HNSW_LINKS, faiss.METRIC_INNER_PRODUCT)
            self._index.hnsw.efConstruction = _EF_CONSTRUCTION
            self._index.hnsw.efSearch = _EF_SEARCH
            if flat.ntotal:
                self.add(flat.reconstruct_n(0, flat.ntotal))
        faiss.omp_set_num_threads(1)
        self._index.add(np.ascontiguousarray(vectors, dtype=np.float32))
        faiss.omp_set_num_threads(self._threads)

    def search(self, vectors: FloatArray, k: int) -> FloatArray:
        """Returns the cosines of the k nearest vectors, float32 [n, k], descending.

        Missing neighbours, in an index of fewer than k vectors, have the cosine -inf.
        """
        scores, rows = self._index.search(np.ascontiguousarray(vectors, dtype=np.float32), k)
        return np.where(rows < 0, np.float32(-np.inf), scores)


def diversify_file(
    texts: Path,
    output: Path,
    kind: Kind,
    options: DiversityOptions,
    *,
    k: int = 5,
    t: float | None = None,
    near: int = 1,
    pair: str = DEFAULT_PAIR,
    vectors: Path | None = None,
    distinct: Path | None = None,
    batch_size: int = 32,
    threads: int = 1,
) -> dict[str, Any]:
    """Writes the lines of a JSONL file that the filter keeps, and a report.

    For `k`, `t` and `near` see `DiversityRule`.

    Args:
        texts: JSONL with `text` and, for documents, `title`; other fields are kept.
        kind: Which side of the pair encodes the texts.
        t: None for the threshold of the pair in `THRESHOLDS`.
        vectors: .npy file of float32 [texts, dimension], instead of encoding.
        distinct: JSONL of texts that are known to differ, from which t is derived.
    """
    started = time.perf_counter()
    if t is None and not distinct:
        t = _known_threshold("" if vectors else Path(pair).stem, kind)
    role: Role = "query" if kind == "queries" else "document"
    cache = output.parent / CACHE / "vectors"

    def encoded(found: Sequence[str]) -> FloatArray:
        side = load_pair(pair), role, found, cache
        return encode(*side, batch_size=batch_size, threads=threads)

    with output_folder(output.parent) as folder:
        if t is None and distinct:
            t = distinct_threshold(encoded(list(dict.fromkeys(_contents(distinct)))))
        rule = DiversityRule(k, cast("float", t), near)
        rows = _rows(texts, folder)
        found = load_vectors(vectors, len(rows)) if vectors else encoded(Texts(rows))
        ready = time.perf_counter()
        origin = sha256_file(vectors) if vectors else json.dumps([pair, kind])
        digest = sha256(origin.encode())
        digest.update(rows.offsets.data)
        digest.update(rows.values.data)
        checkpoint = output.with_name(f".{output.name}.{digest.hexdigest()[:12]}.checkpoint")
        result = diversify(found, rule, options, threads, checkpoint)
        records = zip(read_jsonl(texts), result.kept, strict=True)
        write_jsonl(output, (record for (_, record), kept in records if kept))
        kept = int(result.kept.sum())
        report = {
            "texts": len(rows),
            "kept": kept,
            "dropped": len(rows) - kept,
            "rule": asdict(rule),
            "options": asdict(options),
            "vectors": str(vectors or pair),
            "index": result.index,
            "threads": threads,
            "encode_seconds": round(ready - started, 1),
            "filter_seconds": round(time.perf_counter() - ready, 1),
            "peak_memory_mib": peak_memory() >> 20,
        }
        write_json(output.with_name(f"{output.name}.report.json"), report)
    return report


def _known_threshold(pair: str, kind: Kind) -> float:
    if pair in THRESHOLDS:
        return THRESHOLDS[pair][kind]
    message = f"no threshold is known for the vectors of {pair or 'the file'}: give --t, or with "
    message += "--distinct FILE texts that differ"
    raise CareError(message, code="no_threshold", pair=pair or None)


def load_vectors(path: Path, rows: int) -> FloatArray:
    """Memory-maps an .npy file of float32 [rows, dimension]; other contents are a CareError."""
    try:
        vectors: FloatArray = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise CareError.at(path, f"cannot be read as .npy: {error}", "unreadable") from error
    if vectors.ndim != 2 or len(vectors) != rows or vectors.dtype != np.float32:
        facts = {"dtype": str(vectors.dtype), "shape": list(vectors.shape), "rows": rows}
        reason = f"contains {facts['dtype']} {facts['shape']}, not float32 [{rows}, dimension]"
        raise CareError.at(path, reason, "bad_vectors", **facts)
    return vectors


def peak_memory() -> int:
    """Returns the peak memory of this process [bytes]."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def _contents(path: Path) -> Iterator[str]:
    """Yields the texts to encode."""
    number = 0
    for number, record in read_jsonl(path):
        title = string(path, number, {"title": record.get("title") or ""}, "title")
        yield document_text(title, string(path, number, record, "text"))
    if not number:
        raise DataError.at(path, "has no texts", "no_texts")


def _rows(path: Path, folder: Path) -> Rows:
    """Returns the texts to encode as UTF-8, in an unnamed file in `folder`."""
    lengths = array("q")
    with scratch(folder, np.uint8) as file:
        for text in _contents(path):
            encoded = text.encode()
            file.append(encoded)
            lengths.append(len(encoded))
        return Rows(file.array(), offsets_of(np.frombuffer(lengths, np.int64)))
