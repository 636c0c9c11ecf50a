"""Creates an index without documents, which takes writes, and deletes an index."""

import hashlib
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from pyroaring import BitMap

from core import documents, filters
from core.aliases import read_aliases
from core.canaries import MAX_CANARIES, make_canaries
from core.documents import DocumentReader
from core.encoders import Encoder, Encoding
from core.errors import CareError, CorpusError, EmbeddingSpaceError, IndexVersionError
from core.files import remove_folder, sha256_file, sync, write_text, writing_in
from core.filters import FilterReader
from core.manifest import (
    FULL_TEXT,
    SCHEMA_VERSION,
    SEGMENT_FILE,
    TERMS,
    TOKENS,
    Component,
    CorpusRecord,
    IndexManifest,
    RecallReport,
    SegmentEntry,
)
from core.provenance import library_versions
from core.scratch import temporary_folder
from core.shards import ShardedTokens, ShardedVectors, write_shard
from core.types import Document
from core.verification import compare_files
from core.versions import manifest_text, read_manifest
from indexer.encoding import check_encoded
from indexer.limits import max_text_chars
from indexer.live.segment import file_record, write_documents
from indexer.live.version import publish
from indexer.publication import DELETED, LIVE_KEY, WRITE, IndexWriter, hidden_names, hide
from indexer.publication import hidden as hidden_path
from indexer.records import Reject, parse_record
from indexer.state import check_encoder
from stores.base import NewVersion, VectorStore
from stores.recall import RECALL_K
from stores.token_vectors import token_vector_spec

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
    store = index.stores.get(like.store)
    with _alone(index, "create"):
        if (found := _active(index, store)) is not None:
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
            _, values = write_documents(folder, rows, chunked=chunked)
            components: dict[str, Component] = {}
            if terms := like.components.get(TERMS):
                of_like = index.root / like.name / like.base
                compare_files({of_like / name: one for name, one in terms.files.items()})
                shutil.copytree(of_like / TERMS, folder / TERMS)
                components[TERMS] = terms
            with temporary_folder() as shards:
                new = _new_version(index.name, version, folder, like, encoding, shards)
                store.build(new)
                components |= store.write_contents(new)
            base = like.model_copy(
                update={
                    "schema_version": SCHEMA_VERSION,
                    "name": index.name,
                    "version": version,
                    "parent": None,
                    "number": None,
                    "encoder": encoder.spec,
                    "factory": "Flat",
                    "search_parameters": {},
                    "count": len(rows),
                    "filter_fields": values,
                    "files": {p.name: file_record(p) for p in folder.iterdir() if p.is_file()},
                    "components": components,
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


def _active(index: IndexWriter, store: VectorStore) -> IndexManifest | None:
    """Returns the manifest of the active version; None if there is none."""
    try:
        return read_manifest(index.version(store.active_version(index)))
    except IndexVersionError as error:
        if error.code != "no_active_version":
            raise
        return None


def _new_version(
    name: str, version: str, folder: Path, like: IndexManifest, encoding: Encoding, shards: Path
) -> NewVersion:
    """Returns what a store writes of the base; its vectors are put into the folder `shards`."""
    count = len(_TEXTS)
    with_tokens = TOKENS in like.components
    ids = [str(n) for n in range(count)]
    tokens = encoding.token_vectors if with_tokens else None
    write_shard(shards, 0, encoding.vectors, ids, tokens=0, truncated=0, token_vectors=tokens)
    of_shards = shards, count, np.arange(count)
    return NewVersion(
        index=name,
        version=version,
        folder=folder,
        documents=DocumentReader(folder / documents.FILE_NAME),
        filters=FilterReader(folder / filters.FILE_NAME, {}, count),
        vectors=ShardedVectors(*of_shards),
        full_text=FULL_TEXT in like.components,
        tokens=ShardedTokens(*of_shards) if with_tokens else None,
        token_spec=token_vector_spec(like),
        factory="Flat",
        queries=encoding.vectors[:1],
        recall=1.0,
        threads=1,
        memory=1 << 30,
        progress=False,
    )


def delete_index(index: IndexWriter) -> int | None:
    """Deletes an index.

    Whoever has it open can use its files until it closes them; searches in Milvus fail at once.

    Returns:
        The number of its documents; None if its active version cannot be read.

    Raises:
        IndexVersionError: `no_active_version`, if there is no such index; `index_has_alias`.
        CareError: `index_busy`, if a build of it runs; or a store cannot be reached.
    """
    index.active()
    with _alone(index, "delete"):
        version, documents = index.active(), None
        with suppress(CareError):
            documents = read_manifest(index.version(version)).corpus.documents
        if aliases := [a for a, name in read_aliases(index.root).items() if name == index.name]:
            message = f"index '{index.name}' has the alias '{aliases[0]}': let it mean another "
            message += "index, or remove it (care alias)"
            raise IndexVersionError(message, code="index_has_alias", alias=aliases[0])
        for store in {index.stores.for_version(path) for path in index.path.glob("[!.]*/")}:
            store.delete(index.name)
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
        components = [name in one.components for name in (FULL_TEXT, TOKENS)]
        return [one.store, one.chunking, *components]

    return facts(found) == facts(like) and found.filter_fields.keys() >= set(fields)
