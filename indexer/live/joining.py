"""Joins small segments of an index into one, without encoding."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pyroaring import BitMap

from core.files import sync, sync_folder
from core.manifest import TOKENS, SegmentEntry
from core.types import FloatArray, RowArray
from indexer.live.segment import NewSegment, write_segment
from indexer.publication import IndexWriter
from indexer.state import IndexState

# Segments of about the same size that are joined; a size is a power of it.
TIER = 8
# Vectors that are copied at a time.
_CHUNK_ROWS = 4096


@dataclass(frozen=True, slots=True)
class Joined:
    """Segments that were joined."""

    # By `Part.key` of each segment, in the order of their rows: those that the new one has.
    sources: dict[str, RowArray]
    entry: SegmentEntry  # how manifests name the new segment; no row of it is deleted
    segment: NewSegment

    def is_of(self, state: IndexState) -> bool:
        """Returns whether a version still has all segments that were joined."""
        return self.sources.keys() <= {part.key for part in state.parts}

    def dead(self, gone: dict[str, BitMap]) -> BitMap:
        """Returns the rows of the new segment that are gone, by `Part.key` and their old rows."""
        dead, first = BitMap(), 0
        for key, rows in self.sources.items():
            own = gone[key]
            dead |= BitMap(first + i for i, row in enumerate(rows.tolist()) if row in own)
            first += len(rows)
        return dead


def segments_to_join(entries: Sequence[SegmentEntry], most: float = math.inf) -> list[int]:
    """Returns the places of segments to join: eight or more of about the same number of rows.

    A document is thus written again only when the segment that it is in grows by eight times.
    Segments of more than `most` rows are left as they are.
    """
    tiers: dict[int, list[int]] = {}
    for place, entry in enumerate(entries[1:], start=1):
        live = max(1, entry.count - entry.deleted)
        if live <= most:
            tiers.setdefault(int(math.log(live + 0.5, TIER)), []).append(place)
    return next((places for _, places in sorted(tiers.items()) if len(places) >= TIER), [])


def join(index: IndexWriter, state: IndexState, places: Sequence[int]) -> Joined | None:
    """Writes one segment of the documents of some; the index is locked for builds.

    Its folder has no manifest: it is deleted by a prune unless a version names it. None if no
    document is left in the others.
    """
    with index.new_version("joined") as (version, folder):
        if joined := write_joined(state, places, version, folder):
            sync_folder(folder)
            folder.rename(index.version(version))
            sync(index.path)
        return joined


def write_joined(
    state: IndexState, places: Sequence[int], version: str, folder: Path
) -> Joined | None:
    """Does so in the hidden folder of a new version, which the segment is then part of."""
    spans = list(state.rows.spans())
    sources: dict[str, RowArray] = {}
    rows = []
    for place in places:
        first, end = spans[place]
        live = np.flatnonzero(~state.rows.deleted[first:end])
        sources[state.parts[place].key] = live
        rows.append(first + live)
    taken = np.concatenate(rows)
    if not len(taken):
        return None
    written = write_segment(
        folder,
        state.manifest,
        (state.documents[row] for row in taken.tolist()),
        _vectors(state, taken),
        map(state.tokens, taken.tolist()) if TOKENS in state.manifest.components else None,
    )
    segment = NewSegment.of(folder, version, written, state.manifest)
    entry = SegmentEntry(folder=version, sha256=segment.sha256, count=segment.count)
    return Joined(sources, entry, segment)


def _vectors(state: IndexState, rows: RowArray) -> Iterator[FloatArray]:
    for start in range(0, len(rows), _CHUNK_ROWS):
        yield state.take(rows[start : start + _CHUNK_ROWS])
