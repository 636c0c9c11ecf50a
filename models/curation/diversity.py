"""The diversity filter: of texts that say nearly the same, a few are kept."""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from core.errors import CareError
from core.files import atomic
from core.types import FloatArray, RowArray
from models.curation.vector_index import GrowingIndex, pairs_above

# Seconds between two checkpoints.
_CHECKPOINT_SECONDS = 30.0


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
            raise CareError(f"k {self.k} must be greater than n {self.near}, which may not be < 0")


RULES = {"queries": DiversityRule(5, 0.85, 1), "documents": DiversityRule(5, 0.78, 1)}


@dataclass(frozen=True, slots=True)
class DiversityOptions:
    """How the filter works; each of these can change what is kept.

    Attributes:
        seeds: Texts that are kept unseen and start the index.
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
) -> Diversified:
    """Applies the rule to each text in turn: the seeds first, then the others in their order.

    The result is the same on each run, with any number of threads, and after a kill.

    Args:
        vectors: float32 [n, dimension]; may be mapped from disk. They are scaled to unit norm.
        rule: The rule.
        options: How it is applied.
        threads: Of a search.
        checkpoint: Where decisions are noted as the work goes on, and removed at its end; a
            later call with equal arguments, on the same vectors, goes on from there. The index
            is built again from the decisions, without its searches.

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
    noted = time.monotonic()
    progress = tqdm(total=len(order), desc="diversify", unit=" texts")
    with progress:
        for start in range(0, len(order), options.block):
            part = slice(start, min(start + options.block, len(order)))
            block = _unit(vectors[order[part]])
            if part.stop > done and part.stop > first:
                near = (
                    (index.search(block, rule.k).scores > rule.t).sum(axis=1)
                    if len(index)
                    else np.zeros(len(block), dtype=np.int64)
                )
                _decide(kept[part], near, pairs_above(block, rule.t), rule, max(0, first - start))
            index.add(block[kept[part]])
            progress.update(len(block))
            if checkpoint and part.stop > done and time.monotonic() - noted > _CHECKPOINT_SECONDS:
                _write_checkpoint(checkpoint, identity, kept, part.stop)
                noted = time.monotonic()
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
    seeds = np.zeros(count, dtype=np.bool_)
    chosen = np.random.default_rng(options.seed).permutation(count)[: options.seeds]
    seeds[chosen] = True
    rows = np.arange(count, dtype=np.int64)
    return np.concatenate([rows[seeds], rows[~seeds]])


def _unit(vectors: FloatArray) -> FloatArray:
    vectors = np.asarray(vectors, dtype=np.float32)
    unit: FloatArray = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return unit


def _read_checkpoint(path: Path | None, identity: str, kept: NDArray[np.bool_]) -> int:
    """Fills `kept` as far as decisions were noted, and returns how far that is."""
    if not path or not path.is_file():
        return 0
    with np.load(path, allow_pickle=False) as noted:
        if str(noted["identity"]) != identity:
            raise CareError(
                f"{path} is of another rule, other options or other texts: remove it to start anew"
            )
        done = int(noted["done"])
        kept[:done] = np.unpackbits(noted["kept"], count=done).astype(np.bool_)
    return done


def _write_checkpoint(path: Path, identity: str, kept: NDArray[np.bool_], done: int) -> None:
    with atomic(path) as temporary, temporary.open("wb") as file:
        np.savez(file, identity=identity, done=done, kept=np.packbits(kept[:done]))
