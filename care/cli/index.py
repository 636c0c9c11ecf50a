"""`care index` builds an index from a corpus; `care update` changes documents of an index.

`care merge` joins its segments.
"""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from care.cli.options import Index, Json, takes_fields
from care.cli.output import reporter, show
from care.cli.versions import version_facts, version_line
from care.options import IndexOptions, file, folder, positive
from core.errors import CareError

if TYPE_CHECKING:
    from care.indexing import IndexVersion
    from indexer.build import EncodedCorpus
    from indexer.live.folder import FolderChange

# Files of a line.
_NAMED = 3


@takes_fields
def index(
    corpus: Annotated[
        str,
        Argument(
            metavar="CORPUS",
            help="File (JSONL, Parquet, CSV, TSV, JSON, Excel, text, Markdown, HTML, Word, PDF, "
            "archive), a folder of such files, or a glob.",
        ),
    ],
    index: Index,
    reuse: Annotated[
        bool, Option("--reuse", help="Build nothing if the active version is up to date.")
    ] = False,
    encode_only: Annotated[
        bool, Option("--encode-only", help="Encode into shards; build no index.")
    ] = False,
    dry_run: Annotated[
        bool,
        Option("--dry-run", help="Show how files are read; estimate time and disk; write nothing."),
    ] = False,
    tokens_per_second: Annotated[
        float | None,
        Option(
            metavar="RATE",
            help="Encoding rate of a GPU, for --dry-run (default: measured on this machine).",
            callback=positive,
        ),
    ] = None,
    json_: Json = False,
    *,
    options: IndexOptions,
) -> None:
    """Encode a corpus, build an index version, verify it and activate it.

    An interrupted build resumes if you run the command again.
    """
    if tokens_per_second and not dry_run:
        message = "--tokens-per-second needs --dry-run"
        raise CareError(message, code="option_not_taken", option="--tokens-per-second")
    if encode_only and (dry_run or reuse):
        message = f"--encode-only excludes {'--dry-run' if dry_run else '--reuse'}"
        raise CareError(message, code="option_not_taken", option="--encode-only")
    from care.indexing import build_index, encode_corpus, estimate_build

    if dry_run:
        from indexer.estimate import format_estimate

        estimate, rate = estimate_build(index, corpus, options, tokens_per_second=tokens_per_second)
        facts = {"estimate": asdict(estimate), "rate": asdict(rate)}
        show(facts, format_estimate(estimate, rate), as_json=json_)
    elif encode_only:
        from models.pairs import load_pair

        encoded = encode_corpus(index, corpus, options, progress=True)
        max_length = load_pair(options.pair).document.max_length
        lines = [*_encoded_lines(encoded, max_length), f"shards  {encoded.folder}"]
        show({"shards": encoded.folder, **_encoded_facts(encoded)}, lines, as_json=json_)
    else:
        version = build_index(index, corpus, options, reuse=reuse, progress=True)
        show(_facts(version), _build_lines(version), as_json=json_)


@takes_fields
def update(
    index: Index,
    add: Annotated[
        str | None,
        Option(
            metavar="CORPUS",
            help="Corpus to add, - for JSONL from standard input; a document with a known id "
            "replaces the old one.",
        ),
    ] = None,
    delete: Annotated[Path | None, file("File of ids to delete, one per line.")] = None,
    missing_ok: Annotated[
        bool, Option("--missing-ok", help="Ignore ids in --delete that the index lacks.")
    ] = False,
    watch: Annotated[
        Path | None,
        folder(
            "Follow a folder until Ctrl-C: documents of new, changed and deleted files are added, "
            "replaced and deleted."
        ),
    ] = None,
    encode_all: Annotated[
        bool, Option("--encode-all", help="Encode all documents again, also those with a vector.")
    ] = False,
    json_: Json = False,
    *,
    options: IndexOptions,
) -> None:
    """Add, replace and delete documents: makes a new version and encodes only new texts.

    The new documents become a segment beside those of the active version. If a fifth of the index
    has changed since it was built or merged, the version is built anew, without encoding.

    Store, factory, recall, backend, dtype, full text and token vectors stay those of the active
    version unless you set them. Full text and its weight can be changed alone; vectors then stay as
    they are.
    """
    if watch:
        from care.watching import watch_folder

        given = {"--add": add, "--delete": delete, "--encode-all": encode_all}
        if flag := next((name for name, value in given.items() if value), None):
            raise CareError(f"{flag} excludes --watch", code="option_not_taken", option=flag)
        changes = watch_folder(index, watch, options)
        reporter(as_json=json_)(f"watch   {watch} for index {index}, until Ctrl-C")
        for change in changes:
            show(asdict(change), _change_lines(change), as_json=json_)
        return
    from care.indexing import update_index

    version = update_index(
        index,
        add=add,
        delete=delete,
        missing_ok=missing_ok,
        encode_all=encode_all,
        options=options,
        progress=True,
    )
    show(_facts(version), _update_lines(version), as_json=json_)


@takes_fields
def merge(index: Index, json_: Json = False, *, options: IndexOptions) -> None:
    """Join the segments that updates added into one, without deleted documents; encode nothing.

    The new version equals a build of the documents that the index has. Searches are faster then,
    and deleted documents no longer count in BM25.
    """
    from care.indexing import merge_index

    version = merge_index(index, options=options, progress=True)
    lines = [version_line(version.manifest, version.folder), f"active  {version.folder}"]
    if not version.built:
        lines = [f"active  {version.folder}: nothing to join"]
    show(_facts(version), lines, as_json=json_)


def _build_lines(version: "IndexVersion") -> Iterator[str]:
    if version.encoded is None:
        yield f"active  {version.folder}: it is up to date"
        return
    yield from _encoded_lines(version.encoded, version.manifest.encoder.max_length)
    yield version_line(version.manifest, version.folder)
    if new := version.encoded.summary.new_texts:
        seconds = version.manifest.build_seconds
        yield f"total   {seconds:.1f} s: {new / seconds:,.1f} texts/s"
    yield f"active  {version.folder}"


def _update_lines(version: "IndexVersion") -> Iterator[str]:
    corpus = version.manifest.corpus
    changed = corpus.update and corpus.update.base == version.manifest.parent
    if version.encoded is None and not (version.built and changed):
        kept = "vectors are those of the version before" if version.built else "nothing changes"
        yield f"active  {version.folder}: {kept}"
        return
    if change := corpus.update:
        yield (
            f"update  {change.added:,} documents added, {change.replaced:,} replaced, "
            f"{change.deleted:,} deleted, {change.unchanged:,} unchanged; "
            f"{corpus.unique_texts - corpus.reused_texts:,} texts encoded, "
            f"{corpus.reused_texts:,} reused"
        )
    if version.encoded:
        yield from _encoded_lines(version.encoded, version.manifest.encoder.max_length)
    yield version_line(version.manifest, version.folder)
    yield f"active  {version.folder}"


def _change_lines(change: "FolderChange") -> Iterator[str]:
    more = len(change.files) - _NAMED
    yield (
        f"update  {change.added:,} documents added, {change.replaced:,} replaced, "
        f"{change.deleted:,} deleted, {change.unchanged:,} unchanged: "
        f"{', '.join(change.files[:_NAMED])}{f' and {more:,} more files' if more > 0 else ''}"
    )


def _encoded_lines(encoded: "EncodedCorpus", max_length: int) -> Iterator[str]:
    from indexer.build import FAILED
    from indexer.staging import REJECTS

    staged, summary = encoded.staged, encoded.summary
    new, failed = summary.new_texts, len(encoded.reasons)
    chunks = f" in {staged.chunks:,} chunks" if staged.chunks else ""
    near = f" ({staged.near_duplicates:,} nearly equal)" if staged.near_duplicates else ""
    yield (
        f"corpus  {staged.documents - failed:,} documents{chunks}, "
        f"{staged.unique_texts:,} different texts{near}, "
        f"{summary.tokens:,} tokens; {staged.rejected + failed:,} rejected, "
        f"{summary.truncated:,} truncated at the encoder's length"
    )
    if summary.truncated and not staged.chunks:
        yield f"        --chunk-tokens {max_length} splits long documents into chunks"
    if staged.rejected:
        yield f"        rejects are listed in {encoded.folder / REJECTS}"
    if failed:
        id_, reason = next(iter(encoded.reasons.items()))
        yield (
            f"        {failed:,} documents cannot be encoded, first '{id_}': "
            f"{reason}; all are listed in {encoded.folder / FAILED}"
        )
    if summary.resumed_texts:
        yield f"        {summary.resumed_texts:,} vectors are reused from an earlier run"
    if new:
        yield (
            f"encode  {new:,} texts in {summary.seconds:.1f} s: "
            f"{new / summary.seconds:,.1f} texts/s; "
            f"encoder busy {summary.encoder_seconds / summary.seconds:.1%} of the time"
        )


def _facts(version: "IndexVersion") -> dict[str, Any]:
    encoded = _encoded_facts(version.encoded) if version.encoded else None
    return {
        **version_facts(version.manifest, version.folder),
        "folder": version.folder,
        "built": version.built,
        "encoding": encoded,
        "update": version.manifest.corpus.update and version.manifest.corpus.update.model_dump(),
    }


def _encoded_facts(encoded: "EncodedCorpus") -> dict[str, Any]:
    staged, summary = encoded.staged, encoded.summary
    return {
        "documents": staged.documents - len(encoded.reasons),
        "chunks": staged.chunks,
        "unique_texts": staged.unique_texts,
        "near_duplicates": staged.near_duplicates,
        "rejected": staged.rejected,
        "failed": encoded.reasons,
        "tokens": summary.tokens,
        "truncated": summary.truncated,
        "encoded_texts": summary.new_texts,
        "resumed_texts": summary.resumed_texts,
        "reused_texts": summary.reused_texts,
        "seconds": round(summary.seconds, 3),
    }
