"""`care versions`: list, verify, switch, delete and migrate the versions of an index."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from care.cli.options import Index, Json, takes_fields
from care.cli.output import show
from care.options import Builds, Indexes, Location, MilvusUri, vector_stores
from core.choices import DEFAULT_BUILDS, DEFAULT_INDEXES

if TYPE_CHECKING:
    from core.locks import LockHolder
    from core.manifest import IndexManifest
    from indexer.publication import IndexWriter

app = typer.Typer(
    no_args_is_help=True,
    help="List, verify, activate, roll back, prune and migrate versions of an index.",
)

_RELOAD = "a running service loads it by itself, or after POST /index/reload"

Version = Annotated[
    str, Option(metavar="ID", help="Id of a version; `care versions list` shows them.")
]


@dataclass(frozen=True, slots=True)
class _Listed:
    """An index: its active version if it has one, all versions, and who holds its locks."""

    active: str | None
    manifests: "list[IndexManifest]"
    locks: "list[LockHolder]"


def version_line(manifest: "IndexManifest", folder: Path) -> str:
    """Describes the index of a version: factory, search parameters, size, encoding, recall."""
    parameters = ", ".join(f"{k}={v}" for k, v in manifest.search_parameters.items())
    from search.version_files import version_bytes

    size = version_bytes(folder, manifest)
    return (
        f"index   {_factory(manifest)}{' ' if parameters else ''}{parameters}, "
        f"{manifest.count:,} × {manifest.encoder.dimension}, {size / 1e6:,.1f} MB"
        f"{_segments(manifest)}; "
        f"encoded by {manifest.backend} ({manifest.dtype}); "
        f"recall@{manifest.recall.k} {manifest.recall.recall:.4f} "
        f"on {manifest.recall.queries} queries ({manifest.recall.source})"
    )


def _segments(manifest: "IndexManifest") -> str:
    """Returns what is said of the segments of a version that was not built."""
    if not manifest.segments:
        return ""
    deleted = sum(one.deleted for one in manifest.segments)
    number = len(manifest.segments)
    return f" in {number} segment{'s' if number > 1 else ''} with {deleted:,} deleted"


def version_facts(manifest: "IndexManifest", folder: Path) -> dict[str, Any]:
    """Returns what `--json` prints of a version in a folder."""
    from search.version_files import version_bytes

    return {
        "index": manifest.name,
        "version": manifest.version,
        "parent": manifest.parent,
        "number": manifest.number,
        "created_at": manifest.created_at.isoformat(),
        "embedding_space": manifest.encoder.embedding_space,
        "backend": manifest.backend,
        "dtype": manifest.dtype,
        "documents": manifest.corpus.documents,
        "vectors": manifest.count,
        "store": manifest.store,
        "factory": manifest.factory,
        "search_parameters": manifest.search_parameters,
        "recall": manifest.recall.recall,
        "bytes": version_bytes(folder, manifest),
        "segments": [
            {"folder": one.folder, "rows": one.count, "deleted": one.deleted}
            for one in manifest.segments
        ],
    }


@app.command("list")
def list_(
    index: Annotated[str | None, Option(metavar="NAME", help="Only this index.")] = None,
    indexes: Indexes = DEFAULT_INDEXES,
    json_: Json = False,
) -> None:
    """List the versions of one index or of all; a star marks the active version.

    Commands that hold a lock of the index are shown too.
    """
    from core.errors import IndexVersionError
    from core.versions import IndexFolder
    from indexer.publication import holders

    listed: dict[str, _Listed] = {}
    if index:
        folders = [IndexFolder(indexes, index).path]
    else:
        found = sorted(indexes.glob("*/"))
        folders = [path for path in found if (path / "CURRENT").exists() or holders(path)]
    for folder in folders:
        one, locks, active = IndexFolder(indexes, folder.name), holders(folder), None
        try:
            active = one.active()
        except IndexVersionError as error:
            # The first build of an index holds a lock and has no version yet.
            if error.code != "no_active_version" or not locks:
                raise
        listed[one.name] = _Listed(active, one.manifests(), locks)
    facts = {
        "versions": [
            {
                **version_facts(manifest, IndexFolder(indexes, name).version(manifest.version)),
                "active": manifest.version == one.active,
            }
            for name, one in listed.items()
            for manifest in one.manifests
        ],
        "locks": [
            {"index": name, **asdict(holder)}
            for name, one in listed.items()
            for holder in one.locks
        ],
    }
    show(facts, _lines(indexes, listed), as_json=json_)


@app.command()
@takes_fields
def verify(
    index: Index,
    version: Annotated[
        str | None,
        Option(
            metavar="ID",
            help="Id of a version; `care versions list` shows them (default: the active one).",
        ),
    ] = None,
    *,
    where: Location,
    json_: Json = False,
) -> None:
    """Verify manifest, files, checksums, counts and canaries of a version."""
    from core.versions import IndexFolder, has_checksum
    from indexer.publication import verify_version

    folder = IndexFolder(where.indexes, index)
    version = version or folder.active()
    manifest = verify_version(folder.version(version), vector_stores(where.milvus_uri))
    checked = has_checksum(folder.version(version))
    lines = [version_line(manifest, folder.version(version)), f"verified {version}"]
    if not checked:
        lines[-1] += ", except its manifest: it has no checksum (`care versions migrate` adds one)"
    facts = version_facts(manifest, folder.version(version))
    show({**facts, "manifest_checksum": checked}, lines, as_json=json_)


@app.command()
@takes_fields
def activate(index: Index, version: Version, where: Location, json_: Json = False) -> None:
    """Verify a version and activate it."""
    from indexer import versions

    versions.activate(_writer(index, where), version)
    _show_active(index, version, json_)


@app.command()
@takes_fields
def rollback(index: Index, where: Location, json_: Json = False) -> None:
    """Activate the version before the active one."""
    from indexer import versions

    _show_active(index, versions.rollback(_writer(index, where)), json_)


@app.command()
def prune(
    index: Index,
    keep: Annotated[int, Option(min=0, help="Number of newest versions to keep.")] = 3,
    indexes: Indexes = DEFAULT_INDEXES,
    builds: Builds = DEFAULT_BUILDS,
    milvus_uri: MilvusUri = None,
    json_: Json = False,
) -> None:
    """Delete old versions and their shards; the active version is kept."""
    from indexer import versions

    writer = _writer(index, Location(indexes=indexes, milvus_uri=milvus_uri))
    deleted = versions.prune(writer, builds, keep=keep)
    lines = [f"deleted {version}" for version in deleted] or ["no version to delete"]
    show({"index": index, "deleted": deleted}, lines, as_json=json_)


@app.command()
def migrate(index: Index, indexes: Indexes = DEFAULT_INDEXES, json_: Json = False) -> None:
    """Rewrite manifests in the current schema; nothing is encoded."""
    from indexer import versions
    from indexer.publication import IndexWriter

    migrated = versions.migrate(IndexWriter(indexes, index))
    lines = [f"migrated {version}" for version in migrated]
    lines = lines or [f"no version to migrate: all of '{index}' have the current schema"]
    show({"index": index, "migrated": migrated}, lines, as_json=json_)


def _writer(index: str, where: Location) -> "IndexWriter":
    from indexer.publication import IndexWriter

    return IndexWriter(where.indexes, index, vector_stores(where.milvus_uri))


def _show_active(index: str, version: str, as_json: bool) -> None:
    lines = [f"active  {version}: {_RELOAD}"]
    show({"index": index, "active": version}, lines, as_json=as_json)


def _lines(root: Path, listed: dict[str, _Listed]) -> Iterator[str]:
    if not listed:
        yield f"no index in {root}"
    for name, one in listed.items():
        yield name
        for holder in one.locks:
            process = f"process {holder.pid} on {holder.host}"
            yield f"  locked: {holder.command}, {process}, since {holder.since}"
        if one.active is None:
            yield "  no active version yet"
        elif one.active not in (manifest.version for manifest in one.manifests):
            yield f"  missing: the active version {one.active}; activate another one"
        for manifest in one.manifests:
            rows = "chunks" if manifest.chunking else "documents"
            yield (
                f"  {'*' if manifest.version == one.active else ' '} {manifest.version}  "
                f"{manifest.count:,} {rows}{_segments(manifest)}  {_factory(manifest)}  "
                f"{manifest.encoder.embedding_space}  {manifest.created_at:%Y-%m-%d %H:%M} UTC"
            )


def _factory(manifest: "IndexManifest") -> str:
    return manifest.factory + (" in Milvus" if manifest.store == "milvus" else "")
