"""`python -m indexer`: build, look after and switch the versions of an index."""

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

from core import cli
from core.cli import fraction, positive_float, positive_int, whole_number
from core.cpus import available_cpus
from core.encoders import Encoder, Pair
from core.errors import CareError, ProviderError
from core.manifest import Chunking, IndexManifest
from core.versions import current_version, index_folder, list_versions, read_manifest
from indexer.build import DEFAULT_RECALL, FAILED, BuildOptions, Encoded, build, encode, up_to_date
from indexer.chunking import Chunker
from indexer.estimate import Rate, Sample, described, trial
from indexer.staging import REJECTS
from indexer.update import Changes, active_manifest, kept_factory, update
from indexer.versions import activate, migrate, prune, rollback, verify_version
from models.encoders.factory import (
    BACKENDS,
    DTYPES,
    EncoderOptions,
    default_batch_size,
    document_encoder,
    query_encoder,
    resolve_backend,
    token_counter,
)
from models.pairs import DEFAULT_PAIR, load_pair
from stores.registry import STORES, MilvusAddress, VectorStores

_Run = Callable[[argparse.Namespace], None]

_DEFAULTS = BuildOptions(corpus="", name="")
# What a server's encoder takes at once: enough for all connections, few enough to see progress.
_SERVER_TEXTS = 1024
# Options that only some backends, or an executor, take.
_ONLY_WITH = (
    ("backend", ("transformers", "vllm"), ("dtype",)),
    ("backend", ("vllm",), ("replicas", "tensor_parallel")),
    ("backend", ("openai",), ("base_url", "model", "concurrency", "truncate")),
    ("executor", ("ray",), ("ray_address", "ray_actors")),
)


def main(arguments: list[str] | None = None) -> int:
    """Runs a command and returns the exit status: 0, 1 for a user's error, 130 if interrupted."""
    options = _parser().parse_args(arguments)
    again = "interrupted: the same command resumes where this one stopped"
    return cli.run(lambda: options.run(options), interrupted=again)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m indexer", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: _Run, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(
            name, help=text, formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )
        added.set_defaults(run=run)
        return added

    build_ = command("build", _build, "encode a corpus, build an index, verify and publish it")
    encode_ = command("encode", _encode, "encode a corpus into shards, and stop there")
    for each in (build_, encode_):
        each.add_argument(
            "--corpus", required=True, help="a JSONL or Parquet file, a folder, or a glob"
        )
        _add_build_options(each)
    add = build_.add_argument
    add("--reuse", action="store_true", help="keep an active version that is up to date")
    add("--dry-run", action="store_true", help="estimate tokens, time, disk; write nothing")
    add(
        "--tokens-per-second",
        type=positive_float,
        help="what a GPU encodes, for --dry-run (default: a short trial)",
    )
    update_ = command(
        "update", _update, "make a new version from the active one, encoding only what is new"
    )
    add = update_.add_argument
    add("--add", help="a corpus: new ids are added, known ones replaced")
    add("--delete", type=Path, help="a file of ids to leave out, one a line")
    add("--missing-ok", action="store_true", help="pass over ids to delete that are not there")
    add("--encode-all", action="store_true", help="encode again what has a vector")
    _add_build_options(update_)
    # Without these options the new version is built as the active one was.
    update_.set_defaults(corpus="", store=None, backend=None, dtype=None)
    for name, run, text in (
        ("list", _list, "list the versions of an index, or of all"),
        ("verify", _verify, "check a version through and through"),
        ("activate", _activate, "make a version the active one"),
        ("rollback", _rollback, "make the version before the active one active"),
        ("prune", _prune, "delete old versions and their shards"),
        ("migrate", _migrate, "rewrite manifests in the current schema; nothing is encoded"),
    ):
        add = (added := command(name, run, text)).add_argument
        add("--indexes", type=Path, default=_DEFAULTS.indexes, help="their folder")
        add("--index", required=name != "list", help="name of the index")
        if name not in ("list", "migrate"):
            _add_milvus(added)
        if name in ("verify", "activate"):
            add("--version", required=name == "activate", help="id of a version")
        if name == "prune":
            add("--keep", type=whole_number, default=3, help="newest versions to keep")
            add("--builds", type=Path, default=_DEFAULTS.builds, help="where their shards are kept")
    return parser


def _add_build_options(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--index", required=True, help="name of the index")
    add("--pair", default=DEFAULT_PAIR, help="name of a registered pair, or a .toml file")
    add("--indexes", type=Path, default=_DEFAULTS.indexes, help="where indexes are published")
    add("--builds", type=Path, default=_DEFAULTS.builds, help="where builds keep their shards")
    add("--factory", help="FAISS factory: Flat, HNSW32, IVF1024,SQ8 … (default: by size)")
    add("--store", choices=STORES, default=_DEFAULTS.store, help="where the vectors are kept")
    _add_milvus(command)
    add(
        "--recall",
        type=fraction,
        help=f"recall@10 to reach (default: {DEFAULT_RECALL}, or the best)",
    )
    add("--queries", type=Path, help="held-out queries (JSONL) to measure recall with")
    add(
        "--max-reject-rate",
        type=fraction,
        default=_DEFAULTS.max_reject_rate,
        help="share of records that may be rejected",
    )
    add("--shard-size", type=positive_int, default=_DEFAULTS.shard_size, help="texts in a shard")
    add("--batch-size", type=positive_int, help="texts in a batch (default: vLLM 1024, others 32)")
    add("--chunk-tokens", type=positive_int, help="cut longer documents at sentence ends")
    add(
        "--chunk-overlap",
        type=whole_number,
        default=0,
        help="tokens that chunks share with the last",
    )
    add("--threads", type=positive_int, default=available_cpus(), help="threads to use")
    add(
        "--memory-gib",
        type=positive_float,
        default=_DEFAULTS.memory_gib,
        help="memory for inverted lists in work; what does not fit is built in parts",
    )
    add("--backend", choices=BACKENDS, default="auto", help="what encodes the documents")
    add("--dtype", choices=DTYPES, default="auto", help="what a checkpoint computes in")
    add("--replicas", type=positive_int, default=1, help="engines of vLLM that share the texts")
    add("--tensor-parallel", type=positive_int, default=1, help="GPUs that share a replica's model")
    add("--executor", choices=("local", "ray"), default="local", help="where the encoder runs")
    cluster = command.add_argument_group("--executor ray", "encoding on many machines")
    cluster.add_argument("--ray-address", default="local", help="of the cluster: auto, host:port")
    cluster.add_argument("--ray-actors", type=positive_int, default=1, help="encoders at once")
    server = command.add_argument_group(
        "--backend openai", "a server with /v1/embeddings; its key is read from OPENAI_API_KEY"
    )
    server.add_argument("--base-url", help="address of the server")
    server.add_argument("--model", help="the server's name for the model (default: the pair's)")
    server.add_argument("--concurrency", type=positive_int, default=8, help="requests at once")
    server.add_argument(
        "--truncate", action="store_true", help="ask the server to cut long texts (vLLM can)"
    )
    command.set_defaults(default_of=command.get_default)


def _add_milvus(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--milvus-uri",
        help="address of Milvus (default: CARE_MILVUS_URI); its token is CARE_MILVUS_TOKEN",
    )


def _stores(options: argparse.Namespace) -> VectorStores:
    uri: str | None = options.milvus_uri or os.environ.get("CARE_MILVUS_URI")
    token = os.environ.get("CARE_MILVUS_TOKEN", "")
    return VectorStores(MilvusAddress(uri, token) if uri else None)


def _options(options: argparse.Namespace) -> BuildOptions:
    if options.chunk_overlap and not options.chunk_tokens:
        raise CareError("--chunk-overlap needs --chunk-tokens", code="option_not_taken")
    taken = {
        field.name: getattr(options, field.name)
        for field in fields(BuildOptions)
        if hasattr(options, field.name)
    }
    taken |= {"name": options.index, "stores": _stores(options), "executor": None}
    if options.chunk_tokens:
        taken["chunking"] = Chunking(tokens=options.chunk_tokens, overlap=options.chunk_overlap)
    if options.backend == "openai":
        # A server forms its own batches: a build goes on where another size of requests ended.
        taken["batch_size"] = _SERVER_TEXTS
    return BuildOptions(**taken)


def _pair(options: argparse.Namespace) -> Pair:
    """Loads the pair, and settles what is left to its document encoder."""
    pair = load_pair(options.pair)
    options.backend = resolve_backend(pair.document, options.backend)
    options.batch_size = options.batch_size or default_batch_size(options.backend)
    for what, able, names in _ONLY_WITH:
        chosen = getattr(options, what)
        given = [name for name in names if getattr(options, name) != options.default_of(name)]
        if given and chosen not in able:
            flag = f"--{given[0].replace('_', '-')}"
            message = f"{flag} needs --{what} {' or '.join(able)}; here it is {chosen}"
            raise CareError(message, code="option_not_taken", option=flag)
    return pair


def _encoder_options(options: argparse.Namespace) -> EncoderOptions:
    return EncoderOptions(**{f.name: getattr(options, f.name) for f in fields(EncoderOptions)})


def _documents(
    pair: Pair, options: argparse.Namespace, *, cut: bool
) -> tuple[BuildOptions, Encoder]:
    """Returns how to build and the document encoder, which Ray needs here to cut texts alone."""
    load = partial(document_encoder, pair, _encoder_options(options))
    if options.executor == "local":
        return _options(options), load()
    try:
        from indexer.ray_executor import RayExecutor, RemoteEncoder
    except ModuleNotFoundError as error:
        message = f"--executor ray needs {error.name}: pip install 'care-retrieval[distributed]'"
        raise ProviderError(message, code="not_installed", package=error.name) from error
    on_gpus = pair.document.format != "onnx" and options.backend != "openai"
    settings = _options(options)
    executor = RayExecutor(
        load,
        settings.batch_size,
        address=options.ray_address,
        actors=options.ray_actors,
        threads=options.threads,
        gpus=options.replicas * options.tensor_parallel if on_gpus else 0,
    )
    encoder = load() if cut else RemoteEncoder(pair.document)
    return replace(settings, executor=executor), encoder


def _build(options: argparse.Namespace) -> None:
    pair = _pair(options)
    if options.dry_run:
        _estimate(pair, options)
        return
    if options.tokens_per_second:
        raise CareError("--tokens-per-second needs --dry-run", code="option_not_taken")
    if options.reuse and (current := up_to_date(_options(options), pair.document)):
        print(f"active  {options.indexes / current.name / current.version}: it is up to date")
        return
    how, encoder = _documents(pair, options, cut=bool(options.chunk_tokens))
    manifest, encoded = build(how, encoder, query_encoder(pair, _encoder_options(options)))
    _print_encoded(encoded, pair)
    _print_version(manifest)
    if new := encoded.summary.new_texts:
        seconds = manifest.build_seconds
        print(f"total   {seconds:.1f} s: {new / seconds:,.1f} texts/s")
    print(f"active  {options.indexes / manifest.name / manifest.version}")


def _estimate(pair: Pair, options: argparse.Namespace) -> None:
    settings = _options(options)
    needed = settings.chunking or not options.tokens_per_second
    encoder = document_encoder(pair, _encoder_options(options)) if needed else None
    chunker = Chunker(encoder, settings.chunking) if encoder and settings.chunking else None
    sample = Sample(settings, chunker)
    estimate = sample.estimate(token_counter(pair, options.threads), pair.document.dimension)
    if options.tokens_per_second or not encoder:
        rate = Rate(options.tokens_per_second, "GPU", "as given")
    else:
        devices = options.replicas * options.tensor_parallel if options.backend == "vllm" else 1
        name = f"{options.backend} ({options.dtype})"
        rate = trial(encoder, sample.texts, settings.batch_size, devices, name)
    for line in described(estimate, rate):
        print(line)


def _update(options: argparse.Namespace) -> None:
    stores = _stores(options)
    base = active_manifest(options.indexes, options.index, stores)
    options.store = options.store or base.store
    if options.store == base.store:
        options.factory = options.factory or kept_factory(base)
    if options.recall is None and base.recall.recall >= base.recall.target:
        options.recall = base.recall.target
    options.backend = options.backend or (base.backend if base.backend in BACKENDS else "auto")
    pair = _pair(options)
    options.dtype = options.dtype or (base.dtype if base.dtype in DTYPES else "auto")
    how, encoder = _documents(pair, options, cut=bool(base.chunking))
    updated = update(
        how,
        Changes(options.add, options.delete, options.missing_ok, options.encode_all),
        base,
        encoder,
        query_encoder(pair, _encoder_options(options)),
    )
    if not updated:
        print(f"active  {options.indexes / base.name / base.version}: nothing changes")
        return
    manifest, encoded = updated
    corpus, change = manifest.corpus, manifest.corpus.update
    if change:
        print(
            f"update  {change.added:,} documents added, {change.replaced:,} replaced, "
            f"{change.deleted:,} deleted, {change.unchanged:,} unchanged; "
            f"{corpus.unique_texts - corpus.reused_texts:,} texts encoded, "
            f"{corpus.reused_texts:,} reused"
        )
    _print_encoded(encoded, pair)
    _print_version(manifest)
    print(f"active  {options.indexes / manifest.name / manifest.version}")


def _encode(options: argparse.Namespace) -> None:
    pair = _pair(options)
    encoded = encode(*_documents(pair, options, cut=bool(options.chunk_tokens)))
    _print_encoded(encoded, pair)
    print(f"shards  {encoded.folder}")


def _print_encoded(encoded: Encoded, pair: Pair) -> None:
    staged, summary = encoded.staged, encoded.summary
    new, failed = summary.new_texts, len(encoded.reasons)
    chunks = f" in {staged.chunks:,} chunks" if staged.chunks else ""
    print(
        f"corpus  {staged.documents - failed:,} documents{chunks}, "
        f"{staged.unique_texts:,} different texts, "
        f"{summary.tokens:,} tokens; {staged.rejected + failed:,} rejected, "
        f"{summary.truncated:,} cut at the encoder's length"
    )
    if summary.truncated and not staged.chunks:
        print(f"        --chunk-tokens {pair.document.max_length} would index them to their end")
    if staged.rejected:
        print(f"        rejects are listed in {encoded.folder / REJECTS}")
    if failed:
        id_, reason = next(iter(encoded.reasons.items()))
        print(
            f"        {failed:,} documents cannot be encoded, first '{id_}': "
            f"{reason}; all are listed in {encoded.folder / FAILED}"
        )
    if summary.resumed_texts:
        print(f"        {summary.resumed_texts:,} vectors are reused from an earlier run")
    if new:
        print(
            f"encode  {new:,} texts in {summary.seconds:.1f} s: "
            f"{new / summary.seconds:,.1f} texts/s; "
            f"the encoder worked in {summary.encoder_seconds / summary.seconds:.1%} of the time"
        )


def _print_version(manifest: IndexManifest) -> None:
    parameters = ", ".join(f"{k}={v}" for k, v in manifest.search_parameters.items())
    size = sum(record.bytes for record in manifest.files.values())
    print(
        f"index   {_factory(manifest)}{' ' if parameters else ''}{parameters}, "
        f"{manifest.count:,} × {manifest.encoder.dimension}, {size / 1e6:,.1f} MB; "
        f"recall@{manifest.recall.k} {manifest.recall.recall:.4f} "
        f"on {manifest.recall.queries} queries ({manifest.recall.source})"
    )


def _factory(manifest: IndexManifest) -> str:
    return manifest.factory + (" in Milvus" if manifest.store == "milvus" else "")


def _list(options: argparse.Namespace) -> None:
    root: Path = options.indexes
    names = (
        [options.index] if options.index else sorted(p.parent.name for p in root.glob("*/CURRENT"))
    )
    if not names:
        print(f"no index in {root}")
    for name in names:
        current = current_version(root, name)
        print(name)
        for version in list_versions(root, name):
            manifest = read_manifest(index_folder(root, name) / version)
            rows = "chunks" if manifest.chunking else "documents"
            print(
                f"  {'*' if version == current else ' '} {version}  {manifest.count:,} {rows}  "
                f"{_factory(manifest)}  {manifest.encoder.embedding_space}  "
                f"{manifest.created_at:%Y-%m-%d %H:%M} UTC"
            )


def _verify(options: argparse.Namespace) -> None:
    version = options.version or current_version(options.indexes, options.index)
    folder = index_folder(options.indexes, options.index) / version
    manifest = verify_version(folder, _stores(options))
    _print_version(manifest)
    print(f"verified {version}")


def _activate(options: argparse.Namespace) -> None:
    activate(options.indexes, options.index, options.version, _stores(options))
    print(f"active  {options.version}: reload the service to search it")


def _rollback(options: argparse.Namespace) -> None:
    version = rollback(options.indexes, options.index, _stores(options))
    print(f"active  {version}: reload the service to search it")


def _prune(options: argparse.Namespace) -> None:
    deleted = prune(
        options.indexes, options.index, options.builds, keep=options.keep, stores=_stores(options)
    )
    for version in deleted:
        print(f"deleted {version}")


def _migrate(options: argparse.Namespace) -> None:
    migrated = migrate(options.indexes, options.index)
    for version in migrated:
        print(f"migrated {version}")
    if not migrated:
        print(f"nothing to migrate: all versions of '{options.index}' have the current schema")


if __name__ == "__main__":
    sys.exit(main())
