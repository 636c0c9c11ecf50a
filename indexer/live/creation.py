"""Creates an index without documents, which takes writes, and deletes an index."""

import hashlib
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from pyroaring import BitMap

from core.aliases import read_aliases
from core.canaries import MAX_CANARIES, make_canaries
from core.encoders import Encoder
from core.errors import CareError, CorpusError, EmbeddingSpaceError, IndexVersionError
from core.files import remove_folder, sha256_file, sync, write_text, writing_in
from core.manifest import (
    FULL_TEXT,
    SCHEMA_VERSION,
    SEGMENT_FILE,
    TERMS,
    TOKENS,
    CorpusRecord,
    IndexManifest,
    RecallReport,
    SegmentEntry,
)
from core.provenance import library_versions
from core.types import Document
from core.verification import compare_files
from core.versions import manifest_text, read_manifest
from indexer.encoding import check_encoded
from indexer.limits import max_text_chars
from indexer.live.segment import write_files
from indexer.live.version import publish
from indexer.publication import DELETED, LIVE_KEY, WRITE, IndexWriter, hidden_names, hide
from indexer.publication import hidden as hidden_path
from indexer.records import Reject, parse_record
from indexer.state import check_encoder
from stores.recall import RECALL_K

# The base of an index without documents: every version has rows, and canaries to check encoders by.
# All of them are deleted in its first version.
_TEXTS = (
    *("高血压患者要少吃盐", "儿童发热时多喝水", "骨折后固定患肢", "糖尿病患者监测血糖"),
    *("孕妇定期做产前检查", "牙龈出血时看口腔科", "近视的孩子多到户外", "皮疹部位不要抓挠"),
    *("失眠的人睡前少看手机", "腹泻时注意补充电解质", "哮喘发作时用吸入剂", "老人要预防跌倒"),
    *("乙肝疫苗接种三针", "腰椎间盘突出不宜久坐", "甲状腺结节要做超声", "抑郁情绪可求助心理医生"),
)


def create_index(
    index: IndexWriter, like: IndexManifest, encoder: Encoder, fields: Sequence[str] = ()
) -> tuple[IndexManifest, bool]:
    """Creates an index without documents, or finds that there is an equal one.

    Args:
        index: Its folder.
        like: A version of the index whose chunking, components, weights and term list it gets.
        encoder: Its document encoder, of the embedding space of that version.
        fields: Metadata fields that filters may have before a document has them.

    Returns:
        The manifest of its active version, and whether it was created.

    Raises:
        CorpusError: `invalid_record`, if a field cannot be one of metadata.
        IndexVersionError: `index_exists`, if there is an index of this name with other settings.
        CareError: `index_busy`, if a build of it runs; or the encoder fails.
    """
    record = {"_id": "1", "text": "-", "metadata": dict.fromkeys(fields, 0)}
    if isinstance(fault := parse_record(record, max_text_chars(chunked=False)), Reject):
        raise CorpusError(f"filter_fields: {fault.reason}", code="invalid_record")
    encoding = encoder.encode(_TEXTS)
    check_encoded(encoding.vectors, encoder.spec.dimension, _TEXTS)
    with _alone(index, "create"):
        if (version := index.active_or_none()) is not None:
            found = read_manifest(index.version(version))
            if not _is_equal(found, like, encoder, fields):
                message = f"there is an index '{index.name}' with other settings: choose another "
                message += "name, or delete that index"
                raise IndexVersionError(message, code="index_exists", index=index.name)
            return found, False
        with index.new_version(f"{LIVE_KEY}created", WRITE) as (version, folder):
            chunked = like.chunking is not None
            rows = [
                Document(id=str(n), text=text, parent=str(n) if chunked else None)
                for n, text in enumerate(_TEXTS)
            ]
            tokens = encoding.token_vectors if TOKENS in like.components else None
            facts = write_files(folder, like, rows, [encoding.vectors], tokens)
            if terms := like.components.get(TERMS):
                of_like = index.root / like.name / like.base
                compare_files({of_like / name: one for name, one in terms.files.items()})
                shutil.copytree(of_like / TERMS, folder / TERMS)
                facts = facts.model_copy(update={"components": facts.components | {TERMS: terms}})
            base = like.model_copy(
                update={name: getattr(facts, name) for name in type(facts).model_fields}
                | {
                    "schema_version": SCHEMA_VERSION,
                    "name": index.name,
                    "version": version,
                    "parent": None,
                    "number": None,
                    "encoder": encoder.spec,
                    "store": "faiss",
                    "thresholds": {},
                    "corpus": _corpus(len(rows), chunked=chunked),
                    "recall": RecallReport(
                        k=RECALL_K, queries=0, source="none", target=0.99, recall=1.0, tried={}
                    ),
                    "canaries": make_canaries(_TEXTS[:MAX_CANARIES], encoding.vectors),
                    "created_at": datetime.now(UTC),
                    "build_seconds": 0.0,
                    "libraries": library_versions(),
                    "segments": (),
                }
            )
            write_text(folder / SEGMENT_FILE, manifest_text(base))
            entry = SegmentEntry(
                folder=version,
                sha256=sha256_file(folder / SEGMENT_FILE),
                count=len(rows),
                deleted=len(rows),
            )
            empty = {
                "count": 0,
                "filter_fields": dict.fromkeys(fields, 0),
                "corpus": _corpus(0, chunked=chunked),
                "segments": (entry,),
            }
            manifest = base.model_copy(update=empty)
            return publish(index, folder, manifest, BitMap(range(len(rows))), 1), True


def delete_index(index: IndexWriter) -> int | None:
    """Deletes an index. Whoever has it open can use it until it closes the files.

    Returns:
        The number of its documents; None if its active version cannot be read.

    Raises:
        IndexVersionError: `no_active_version`, if there is no such index; `index_has_alias`.
        CareError: `index_busy`, if a build of it runs; `no_segments`, if vectors are in Milvus.
    """
    index.active()
    with _alone(index, "delete"):
        version, documents = index.active(), None
        with suppress(CareError):
            documents = read_manifest(index.version(version)).corpus.documents
        if next(index.path.glob("*/vectors.milvus"), None):
            message = (
                f"index '{index.name}' has vectors in Milvus: drop its collections there, and "
            )
            message += "remove its folder"
            raise CareError(message, code="no_segments")
        if aliases := [a for a, name in read_aliases(index.root).items() if name == index.name]:
            message = f"index '{index.name}' has the alias '{aliases[0]}': let it mean another "
            message += "index, or remove it (care alias)"
            raise IndexVersionError(message, code="index_has_alias", alias=aliases[0])
        gone = hide(index.path)
        sync(index.root)
    remove_folder(gone)
    remove_deleted_indexes(index.root)
    return documents


def remove_deleted_indexes(root: Path) -> None:
    """Removes what killed processes left of indexes that they were deleting."""
    for name in hidden_names(root, DELETED):
        remove_folder(hidden_path(root, name, DELETED))


@contextmanager
def _alone(index: IndexWriter, command: str) -> Iterator[None]:
    """Locks an index for builds and changes in the block."""
    try:
        with writing_in(index.root), index.building(command), index.changing(command):
            yield
    except CareError as error:
        if error.code != "locked":
            raise
        message = f"another process builds or changes the index '{index.name}': retry when it ends"
        raise CareError(message, code="index_busy", index=index.name) from error


def _corpus(documents: int, *, chunked: bool) -> CorpusRecord:
    return CorpusRecord(
        checksum=hashlib.sha256().hexdigest(),
        files=[],
        documents=documents,
        unique_texts=documents,
        rejected=0,
        truncated=0,
        tokens=0,
        chunks=documents if chunked else None,
    )


def _is_equal(
    found: IndexManifest, like: IndexManifest, encoder: Encoder, fields: Sequence[str]
) -> bool:
    """Returns whether an index has the settings that one like another would get."""
    try:
        check_encoder(found, encoder.spec)
    except EmbeddingSpaceError:
        return False

    def facts(one: IndexManifest) -> list[object]:
        return [one.chunking, *(name in one.components for name in (FULL_TEXT, TOKENS))]

    return facts(found) == facts(like) and found.filter_fields.keys() >= set(fields)
