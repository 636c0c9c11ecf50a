"""A sample of a corpus, spread over it, and totals that follow from one.

JSONL is sampled by its bytes: the lines that begin in evenly spaced blocks. Parquet says how
many rows it has, and is sampled by them. A small corpus is read whole.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from core.errors import CorpusError
from core.types import Document
from indexer.corpus import UNREADABLE, Reject, read_part, read_rows

_BLOCK_BYTES = 64 * 1024
_BLOCKS = 64
_BLOCK_ROWS = 64
_GROUPS = 32
_GROUP_BLOCKS = 2
# Its multiples, less their whole parts, lie evenly between 0 and 1 however many there are.
_GOLDEN = 0.6180339887


@dataclass(frozen=True, slots=True)
class Block:
    """Records that follow each other; its size is in the units of its stratum."""

    size: int
    records: list[Document | Reject]


@dataclass(frozen=True, slots=True)
class Stratum:
    """Blocks of the files of one kind, of `units` bytes or rows in all."""

    units: int
    blocks: list[Block]


@dataclass(frozen=True, slots=True)
class Total:
    """An estimate; the true value lies within ± `spread` of it in 95 cases of 100."""

    value: float
    spread: float


def sample(files: Sequence[Path], max_chars: int) -> list[Stratum]:
    """Reads a sample of at most 4 MiB of JSONL and 4096 rows of Parquet, or some more.

    Args:
        files: The corpus files.
        max_chars: The longest text that is a document.

    Raises:
        CorpusError: If a file cannot be read.
    """
    lines = [file for file in files if file.suffix == ".jsonl"]
    tables = [file for file in files if file.suffix == ".parquet"]
    try:
        strata = [_sample_lines(lines, max_chars), _sample_rows(tables, max_chars)]
    except UNREADABLE as error:
        raise CorpusError(f"the corpus cannot be read: {' '.join(str(error).split())}") from error
    return [stratum for stratum in strata if stratum.blocks]


def total(strata: Sequence[Stratum], values: Callable[[Block], float]) -> Total:
    """Estimates the sum of a value over the whole corpus from that of each block.

    The ratio estimator for clusters of unequal size, with its variance (Cochran, Sampling
    Techniques, 3rd edition, 1977, equations 6.1 and 6.13); evenly spaced blocks are taken as
    random ones. Of a corpus that was read whole it is the sum.
    """
    parts = [_ratio(stratum, [values(block) for block in stratum.blocks]) for stratum in strata]
    spread = sum(part.spread**2 for part in parts) ** 0.5
    return Total(sum(part.value for part in parts), spread)


def _ratio(stratum: Stratum, values: Sequence[float]) -> Total:
    y, u = np.array(values), np.array([block.size for block in stratum.blocks])
    ratio = y.sum() / u.sum()
    unread = 1 - u.sum() / stratum.units
    if unread <= 0 or len(y) < 2:
        return Total(float(ratio * stratum.units), 0.0 if unread <= 0 else float("inf"))
    variance = unread / len(y) * ((y - ratio * u) ** 2).sum() / (len(y) - 1) / u.mean() ** 2
    return Total(float(ratio * stratum.units), float(1.96 * stratum.units * variance**0.5))


def _sample_lines(files: Sequence[Path], max_chars: int) -> Stratum:
    sizes = [file.stat().st_size for file in files]
    ends = np.cumsum(sizes, dtype=np.int64)
    units = int(ends[-1]) if files else 0
    if units <= _BLOCKS * _BLOCK_BYTES:
        starts = np.arange(0, units, _BLOCK_BYTES)
    else:
        starts = np.arange(_BLOCKS) * units // _BLOCKS
    blocks = []
    for start in starts:
        end = min(int(start) + _BLOCK_BYTES, units)
        records: list[Document | Reject] = []
        # A block may lie in several files.
        for at in range(int(np.searchsorted(ends, start, side="right")), len(files)):
            base = int(ends[at]) - sizes[at]
            if base >= end:
                break
            part = max(int(start) - base, 0), min(end - base, sizes[at])
            records += read_part(files[at], *part, max_chars)
        blocks.append(Block(end - int(start), records))
    return Stratum(units, blocks)


def _sample_rows(files: Sequence[Path], max_chars: int) -> Stratum:
    groups = []
    for file in files:
        metadata = pq.read_metadata(file)
        groups += [
            (file, group, metadata.row_group(group).num_rows)
            for group in range(metadata.num_row_groups)
        ]
    units = sum(rows for _, _, rows in groups)
    if units <= _GROUPS * _GROUP_BLOCKS * _BLOCK_ROWS:
        chosen = [(file, group, slice(0, None)) for file, group, _ in groups]
    else:
        number = min(len(groups), _GROUPS)
        most = _GROUPS * _GROUP_BLOCKS // number
        chosen = []
        for i in range(number):
            file, group, rows = groups[(2 * i + 1) * len(groups) // (2 * number)]
            # Spread over the group, in each from another place on.
            step = -(-rows // (_BLOCK_ROWS * most))
            start = int((i + 1) * _GOLDEN % 1 * step)
            chosen.append((file, group, slice(start, None, step)))
    blocks = [
        Block(len(records), records)
        for file, group, place in chosen
        for records in read_rows(file, group, _BLOCK_ROWS, place, max_chars)
    ]
    return Stratum(units, blocks)
