"""The diversity filter: of texts that say nearly the same, a few are kept."""

import json
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import faiss
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from core.errors import CareError, DataError
from core.files import atomic, sha256_file
from core.records import read_jsonl, string, write_json
from core.text import document_text
from core.types import FloatArray, RowArray
from curation.common import CACHE, output_folder
from curation.retrieval import encode
from models.pairs import DEFAULT_PAIR

_HNSW_LINKS = 32
_EF_CONSTRUCTION = 64
_EF_SEARCH = 64

Kind = Literal["queries", "documents"]


@dataclass(frozen=True, slots=True)
class DiversityRule:
    """A text is dropped if more than `near` of its `k` nearest kept texts are closer than `t`.

    Attributes:
        k: Neighbours that are looked at; more than `near`, or nothing would be dropped.
        t: Cosine similarity above which a neighbour is near.
        near: Near neighbours that a text may have.
    """

    k: int
    t: float
    near: int

    def __post_init__(self) -> None:
        if not 0 <= self.near < self.k:
            raise CareError(
                f"k {self.k} must be greater than n {self.near}, and n at least 0",
                code="bad_rule",
                k=self.k,
                n=self.near,
            )


RULES = {"queries": DiversityRule(5, 0.85, 1), "documents": DiversityRule(5, 0.78, 1)}


@dataclass(frozen=True, slots=True)
class DiversityOptions:
    """How the filter works; each of these can change what is kept.

    Attributes:
        seeds: Texts that are kept without a check and start the index.
        seed: Of the choice of seeds.
        flat_limit: Kept texts up to which the search is exact.
        block: Texts that are searched for at once. Among those of a block the rule is applied
            in turn, so an exact search keeps what one text at a time would have kept.
    """

    seeds: int = 5000
    seed: int = 0
    flat_limit: int = 100_000
    block: int = 512


@dataclass(frozen=True, slots=True)
class Diversified:
    """What was kept, bool [n], and the index in which it ended."""

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
    """Applies the rule to each text in turn: the seeds first, then the others in their order.

    The result is the same on each run, with any number of threads, and after a kill.

    Args:
        vectors: float32 [n, dimension]; may be mapped from disk. They are scaled to unit norm.
        rule: The rule.
        options: How it is applied.
        threads: Of a search.
        checkpoint: Where decisions are saved as the work goes on, and removed at its end; a
            later call with equal arguments, on the same vectors, continues from there. The index
            is built again from the decisions, without its searches.
        checkpoint_seconds: The least time between two writes of it [s].

    Raises:
        CareError: If the checkpoint is of other arguments.
    """
    options = options or DiversityOptions()
    order = _order(len(vectors), options)
    first = min(options.seeds, len(order))
    kept = np.zeros(len(order), dtype=np.bool_)
    kept[:first] = True
    identity = json.dumps([list(vectors.shape), asdict(rule), asdict(options)])
    done = _read_checkpoint(checkpoint, identity, kept)
    index = GrowingIndex(vectors.shape[1], options.flat_limit, threads)
    saved = time.monotonic()
    with tqdm(total=len(order), desc="diversify", unit=" texts") as progress:
        for start in range(0, len(order), options.block):
            part = slice(start, min(start + options.block, len(order)))
            block = _unit(vectors[order[part]])
            if part.stop > done and part.stop > first:
                near = (index.search(block, rule.k) > rule.t).sum(axis=1)
                closer = block @ block.T > rule.t
                _decide(kept[part], near, closer, rule, max(0, first - start))
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


def _decide(
    kept: NDArray[np.bool_],
    near: NDArray[np.integer[Any]],
    closer: NDArray[np.bool_],
    rule: DiversityRule,
    decided: int,
) -> None:
    """Decides for a block, in place.

    More than `near` of the k nearest are close if, and only if, more than `near` of all are:
    it is enough to add up those in the index, at most k, and those kept in the block so far.

    Args:
        kept: bool [n], of which the first `decided` are given.
        near: Neighbours in the index that are close, [n].
        closer: bool [n, n], which of the block are close to each other.
        rule: The rule.
        decided: The number of seeds in the block.
    """
    for at in range(decided, len(kept)):
        inside = np.count_nonzero(closer[at, :at] & kept[:at])
        kept[at] = near[at] + inside <= rule.near


def _order(count: int, options: DiversityOptions) -> RowArray:
    """Returns all rows: the seeds in their order, then the others in theirs."""
    shuffled = np.random.default_rng(options.seed).permutation(count)
    seeds, others = np.split(shuffled, [options.seeds])
    return np.concatenate([np.sort(seeds), np.sort(others)])


def _unit(vectors: FloatArray) -> FloatArray:
    vectors = np.asarray(vectors, dtype=np.float32)
    unit: FloatArray = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return unit


def _read_checkpoint(path: Path | None, identity: str, kept: NDArray[np.bool_]) -> int:
    """Fills `kept` as far as decisions were saved, and returns how far that is."""
    if not path or not path.is_file():
        return 0
    with np.load(path, allow_pickle=False) as saved:
        if str(saved["identity"]) != identity:
            raise CareError(
                f"{path} is of another rule, other options or other texts: remove it to start anew",
                code="other_checkpoint",
                path=path,
            )
        done = int(saved["done"])
        kept[:done] = np.unpackbits(saved["kept"], count=done).astype(np.bool_)
    return done


class GrowingIndex:
    """Unit vectors by inner product: Flat up to a size, HNSW from there on.

    Flat is exact. HNSW finds most neighbours, not all; its graph depends on the order of
    additions and on nothing else, since they run on one thread.

    Args:
        dimension: Of the vectors.
        flat_limit: The most vectors of Flat.
        threads: Of a search.
    """

    def __init__(self, dimension: int, flat_limit: int, threads: int = 1) -> None:
        self._dimension = dimension
        self._flat_limit = flat_limit
        self._threads = threads
        self._index: faiss.Index = faiss.IndexFlatIP(dimension)

    def __len__(self) -> int:
        return int(self._index.ntotal)

    @property
    def kind(self) -> str:
        """Flat or HNSW."""
        return "Flat" if isinstance(self._index, faiss.IndexFlatIP) else f"HNSW{_HNSW_LINKS}"

    def add(self, vectors: FloatArray) -> None:
        """Adds unit vectors, float32 [n, dimension]; their rows follow those that are there."""
        if self.kind == "Flat" and len(self) + len(vectors) > self._flat_limit:
            flat = self._index
            self._index = faiss.IndexHNSWFlat(
                self._dimension, _HNSW_LINKS, faiss.METRIC_INNER_PRODUCT
            )
            self._index.hnsw.efConstruction = _EF_CONSTRUCTION
            self._index.hnsw.efSearch = _EF_SEARCH
            if flat.ntotal:
                self.add(flat.reconstruct_n(0, flat.ntotal))
        with _faiss_threads(1):
            self._index.add(np.ascontiguousarray(vectors, dtype=np.float32))

    def search(self, vectors: FloatArray, k: int) -> FloatArray:
        """Returns the cosines of the k nearest of each vector, float32 [n, k], descending.

        They are -inf where there are fewer than k.
        """
        with _faiss_threads(self._threads):
            scores, rows = self._index.search(np.ascontiguousarray(vectors, dtype=np.float32), k)
        return np.where(rows < 0, np.float32(-np.inf), scores)


@contextmanager
def _faiss_threads(count: int) -> Iterator[None]:
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(count)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)


def diversify_file(
    texts: Path,
    output: Path,
    kind: Kind,
    rule: DiversityRule,
    options: DiversityOptions,
    *,
    pair: str = DEFAULT_PAIR,
    vectors: Path | None = None,
    batch_size: int = 32,
    threads: int = 1,
) -> dict[str, Any]:
    """Writes the lines of a JSONL file that the filter keeps, and a report beside them.

    Args:
        texts: JSONL with `text` and, of documents, `title`; other fields are kept.
        output: The file for what is kept; `.report.json` behind its name is the report.
        kind: The side of the pair that encodes.
        rule: The rule.
        options: How it is applied.
        pair: The pair that encodes.
        vectors: .npy of float32 [texts, dimension] in place of the pair's.
        batch_size: Texts encoded at once.
        threads: Of encoder and search.

    Returns:
        The report.

    Raises:
        CareError: If a file is wrong.
    """
    started = time.perf_counter()
    lines, contents = _read(texts)
    with output_folder(output.parent):
        found = (
            load_vectors(vectors, len(lines))
            if vectors
            else encode(
                pair,
                "query" if kind == "queries" else "document",
                contents,
                output.parent / CACHE / "vectors",
                batch_size=batch_size,
                threads=threads,
            )
        )
        encoded = time.perf_counter()
        origin = sha256_file(vectors) if vectors else json.dumps([pair, kind])
        name = sha256("\0".join([origin, *contents]).encode()).hexdigest()[:12]
        result = diversify(
            found, rule, options, threads, output.with_name(f".{output.name}.{name}.checkpoint")
        )
        with atomic(output) as temporary, temporary.open("w", encoding="utf-8") as file:
            file.writelines(
                f"{line}\n" for line, keep in zip(lines, result.kept, strict=True) if keep
            )
        kept = int(result.kept.sum())
        report = {
            "texts": len(lines),
            "kept": kept,
            "dropped": len(lines) - kept,
            "rule": asdict(rule),
            "options": asdict(options),
            "vectors": str(vectors or pair),
            "index": result.index,
            "threads": threads,
            "encode_seconds": round(encoded - started, 1),
            "filter_seconds": round(time.perf_counter() - encoded, 1),
            "peak_memory_mib": peak_memory() >> 20,
        }
        write_json(output.with_name(f"{output.name}.report.json"), report)
    return report


def load_vectors(path: Path, rows: int) -> FloatArray:
    """Maps float32 vectors [rows, dimension] from an .npy file.

    Raises:
        CareError: If the file holds anything else.
    """
    try:
        vectors: FloatArray = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise CareError(
            f"{path} cannot be read as .npy: {error}", code="unreadable", path=path
        ) from error
    if vectors.ndim != 2 or len(vectors) != rows or vectors.dtype != np.float32:
        raise CareError(
            f"{path} holds {vectors.dtype} {list(vectors.shape)} instead of float32 [{rows}, "
            "dimension]",
            code="bad_vectors",
            path=path,
            dtype=str(vectors.dtype),
            shape=list(vectors.shape),
            rows=rows,
        )
    return vectors


def peak_memory() -> int:
    """Returns the most memory that this process has held [bytes]."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def _read(path: Path) -> tuple[list[str], list[str]]:
    """Returns lines and, for the encoder, texts."""
    lines, texts = [], []
    for number, record in read_jsonl(path):
        lines.append(json.dumps(record, ensure_ascii=False))
        title = string(path, number, {"title": record.get("title") or ""}, "title")
        texts.append(document_text(title, string(path, number, record, "text")))
    if not lines:
        raise DataError(f"{path} holds no texts", code="no_texts", path=path)
    return lines, texts
