"""A snapshot: what a query sees of an index, opened from one of its versions and checked."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pydantic_core import to_json

from core import documents
from core.canaries import check_canaries
from core.encoders import Encoder, EncoderSpec, Pair
from core.errors import EmbeddingSpaceError
from core.manifest import TABLES, IndexManifest
from core.text import document_text
from core.types import Mode, RowArray
from core.verification import verify_files
from core.versions import IndexFolder, opening, read_manifest, with_version
from search.answerable import Judges, suitable
from search.rerank import LateReranker
from search.version_files import VersionFiles
from stores.base import ScoredRows, VectorStore
from stores.faiss.store import FaissStore
from stores.order import ordered
from stores.segment import Segment, Segments, open_segments, parts_of
from stores.token_vectors import TokenVectors


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a query sees of an index; released when the last request that uses it ends.

    Attributes:
        identity: Checksum of the manifest, which names version and files and their checksums.
        reference: Name and version as JSON, for answers.
        files: The files before they were verified.
        manifest: The manifest of the version.
        segments: The open files; `segment` is all of them as one.
        judges: What judges whether the index answers a query, by mode: those of the pair that
            were fitted on an index of about this size.
        late: What reranks by late interaction, if version and pair have token vectors of one space.
    """

    identity: str
    reference: bytes
    files: VersionFiles
    manifest: IndexManifest
    segments: Segments
    judges: Judges
    late: LateReranker | None

    @property
    def segment(self) -> Segment:
        return self.segments.all

    @property
    def document_bytes(self) -> int:
        """Mean size of a document or chunk in its file [bytes]."""
        if tables := self.manifest.components.get(TABLES):
            return int(tables.settings["document_bytes"])
        parts = self.segments.parts
        size = sum(part.manifest.files[documents.FILE_NAME].bytes for part in parts)
        return size // self.segment.count

    @property
    def most_hits(self) -> int:
        """The most hits that a search can find, at least 1, so that each depth is a valid one."""
        return max(1, self.manifest.count)

    @property
    def modes(self) -> tuple[Mode, ...]:
        """The modes of search that the version has, the default first."""
        if self.segment.full_text is None:
            return ("dense",)
        if self.manifest.fusion:
            return ("hybrid", "dense", "lexical")
        return ("dense", "hybrid", "lexical")

    @property
    def answerable_thresholds(self) -> dict[Mode, float]:
        """By mode, the score below which nothing in the index seems to answer a query."""
        modes = self.modes
        return {mode: judge.threshold for mode, judge in self.judges.items() if mode in modes}

    def ordered(self, found: ScoredRows, most: int | None = None) -> ScoredRows:
        """Returns the `most` first scored rows, by default all, in the order of hits."""
        read = self.segment.documents.read
        return ordered(found, lambda rows: [stored.id for stored in read(rows)], most)

    def texts(self, rows: RowArray) -> list[str]:
        """Returns the text of each row, with its title, as encoders read it."""
        read = self.segment.documents.read(rows.tolist())
        return [document_text(stored.title, stored.text) for stored in read]


def load_index(
    index: IndexFolder,
    encoder: Encoder,
    store: VectorStore | None = None,
    others: Sequence[Encoder] = (),
    pair: Pair | None = None,
) -> Snapshot:
    """Opens the active version of an index and checks its files, counts and canaries.

    The canaries are checked with each encoder. `pair` has the calibration of the answerable score
    and the weight of late interaction.

    If another version becomes active and the first one is pruned meanwhile, the new one is opened.

    Raises:
        IndexVersionError: If the index has no active version, or a check fails.
        EmbeddingSpaceError: If index and query encoder do not share one embedding space.
    """
    store = store or FaissStore()
    return with_version(
        lambda: store.active_version(index),
        lambda version: open_version(index.version(version), encoder, store, others, pair),
    )


def open_version(
    folder: Path,
    encoder: Encoder,
    store: VectorStore,
    others: Sequence[Encoder] = (),
    pair: Pair | None = None,
    *,
    verified: bool = False,
    canaries: int | None = None,
    old: "Snapshot | None" = None,
) -> Snapshot:
    """Opens the version in a folder and checks it as `load_index`, with the same errors.

    `verified` says that another process has just compared the files with their checksums;
    `canaries` is the number of canaries that are checked, by default all. What an `old` snapshot of
    the index has open is neither opened nor checked again, nor are the canaries if it has the same.
    """
    with opening(folder):
        manifest = read_manifest(folder)
        files = VersionFiles.of(folder, manifest)
    known = old.segments.opened if old and not old.files.changed_in_place() else {}
    parts = parts_of(known)
    if known and old and old.manifest.canaries == manifest.canaries:
        canaries = 0
    for each in (encoder, *others):
        check_space(manifest, each.spec)
    with ThreadPoolExecutor(1) as pool:
        verification = None if verified else pool.submit(verify_files, folder, manifest, parts)
        try:
            for each in (encoder, *others):
                if canaries != 0:
                    check_canaries(each, manifest.canaries[:canaries])
        finally:
            with opening(folder):
                if verification:
                    verification.result()
    with opening(folder):
        segments = open_segments(folder, manifest, store, known)
    reference = to_json({"name": manifest.name, "version": manifest.version})
    judges = suitable(pair.answerable, manifest.count) if pair else {}
    late = _late_reranker(segments.all.tokens, pair)
    opened = files, manifest, segments, judges, late
    return Snapshot(manifest.identity, reference, *opened)


def _late_reranker(tokens: TokenVectors | None, pair: Pair | None) -> LateReranker | None:
    how = pair.late_interaction if pair else None
    if tokens is None or how is None or how.space != tokens.spec.space:
        return None
    return LateReranker(tokens, how.weight)


def check_space(
    manifest: IndexManifest, query_encoder: EncoderSpec, setting: str = "CARE_PAIR"
) -> None:
    """Raises `EmbeddingSpaceError` if index and query encoder name different embedding spaces.

    The message names the setting that chooses the query encoder.
    """
    of_index, of_encoder = manifest.encoder.embedding_space, query_encoder.embedding_space
    if of_index != of_encoder:
        raise EmbeddingSpaceError(
            f"index '{manifest.name}' has the embedding space '{of_index}' and the query encoder "
            f"has '{of_encoder}': set {setting} to a pair of the space that the index was built in",
            index=manifest.name,
            embedding_space=of_index,
            encoder_space=of_encoder,
        )
