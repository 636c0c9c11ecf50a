"""Building and updating indexes from files or from documents in memory."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from care import extras
from care.corpora import Corpus, corpus_path
from care.options import IndexOptions, vector_stores
from core.choices import Backend, Dtype
from core.encoders import Encoder, Pair, TokenVectorSpec
from core.errors import CareError, PairError, ProviderError
from core.machine import available_cpus
from core.manifest import FULL_TEXT, TOKENS, Chunking, IndexManifest
from core.terms import TermList, term_list
from core.versions import IndexFolder
from indexer.build import BuildOptions, EncodedCorpus, build, encode, up_to_date
from indexer.chunking import Chunker
from indexer.estimate import CorpusSample, EncodingRate, Estimate, measure_rate
from indexer.publication import IndexWriter
from indexer.readers.fields import FieldNames
from indexer.rewriting import has_token_vectors
from indexer.update import (
    Changes,
    active_manifest,
    merge,
    requested_factory,
    same_components,
    update,
    update_components,
)
from models.encoders.factory import (
    EncoderOptions,
    default_batch_size,
    document_encoder,
    query_encoder,
    resolve_backend,
    resolve_dtype,
    token_counter,
)
from models.pairs import load_pair
from stores.term_list import GIVEN, read_terms

# Texts of one call of a server's encoder: enough to fill all connections.
_SERVER_TEXTS = 1024
# Options that only some backends, or an executor, take.
_ONLY_WITH: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("backend", ("openvino", "transformers", "vllm"), ("dtype",)),
    ("backend", ("vllm",), ("replicas", "tensor_parallel")),
    ("backend", ("openai",), ("base_url", "model", "concurrency", "truncate")),
    ("executor", ("ray",), ("ray_address", "ray_actors")),
)


@dataclass(frozen=True, slots=True)
class IndexVersion:
    """A published, active version of an index.

    Attributes:
        manifest: Content of `manifest.json`: encoder, checksums, counts, recall.
        folder: Folder of the version.
        encoded: The encoded corpus with counts and times, or None if no corpus was read.
        built: Whether the call has built the version; else it was active before.
    """

    manifest: IndexManifest
    folder: Path
    encoded: EncodedCorpus | None = None
    built: bool = False

    @property
    def name(self) -> str:
        """Name of the index."""
        return self.manifest.name

    @property
    def id(self) -> str:
        """Id of the version."""
        return self.manifest.version

    @property
    def documents(self) -> int:
        """Number of documents."""
        return self.manifest.corpus.documents


def build_index(
    name: str,
    corpus: Corpus,
    options: IndexOptions | None = None,
    *,
    reuse: bool = False,
    progress: bool = False,
    **changes: Any,
) -> IndexVersion:
    """Encodes a corpus, builds an index version, verifies it and activates it.

    An interrupted build resumes if the function is called again: complete shards in the folder
    `options.builds` are not encoded again.

    Example:
        >>> documents = [{"_id": "1", "title": "高血压", "text": "少吃盐，多运动。"}]
        >>> version = care.build_index("mine", documents, factory="Flat")
        >>> version.documents
        1

    Args:
        name: Name of the index.
        corpus: Path of a file, a folder or a glob; or an iterable of documents: mappings with
            `_id`, `text` and optionally `title` and `metadata`, or texts, whose ids are their
            numbers from 1; or a data frame of pandas, Polars or Arrow.
        options: Options of the build; None for the defaults.
        reuse: Whether to return the active version if a build would only repeat it.
        progress: Whether to show progress bars on standard error.
        **changes: Fields of `IndexOptions` that replace those of `options`.

    Returns:
        The new version; with `reuse` possibly the active one, whose `encoded` is None.

    Raises:
        CorpusError: If the corpus cannot be read, or too many of its documents are rejected.
        PairError: If the pair is unknown or its files are wrong.
        CareError: If the build fails for another reason. No version is published.
    """
    chosen = replace(options or IndexOptions(), **changes)
    pair, chosen = _resolve(chosen)
    with corpus_path(corpus, chosen.builds) as path:
        settings = _build_options(name, path, chosen, pair, progress=progress)
        if reuse and (current := up_to_date(settings, pair.document)):
            return _version(current, chosen)
        settings, encoder = _executor(pair, settings, chosen, cut=bool(chosen.chunk_tokens))
        queries = query_encoder(pair, encoder_options(chosen))
        manifest, encoded = build(settings, encoder, queries)
    return _version(manifest, chosen, encoded, built=True)


def update_index(
    name: str,
    *,
    add: Corpus | None = None,
    delete: str | Path | Iterable[str | int] | None = None,
    missing_ok: bool = False,
    encode_all: bool = False,
    options: IndexOptions | None = None,
    progress: bool = False,
    **changes: Any,
) -> IndexVersion:
    """Makes a version with other documents of the active one, encoding only new texts.

    The new documents become a segment, so that the time grows with them and not with the index. If
    a fifth of the index has changed since it was built or merged, it is built anew.

    Without `add` and `delete`, `full_text`, `terms` and `lexical_weight` can still change, and
    token vectors can be removed: the files of the vectors then stay as they are. To add token
    vectors, all documents are encoded again.

    Example:
        >>> version = care.update_index("mine", add=[{"_id": "2", "text": "…"}], delete=["1"])
        >>> version = care.update_index("mine", lexical_weight=0.1)

    Args:
        name: Name of the index.
        add: Documents as in `build_index`; a known id replaces its document.
        delete: Ids of documents to delete, or the path of a file with one id per line.
        missing_ok: Whether ids in `delete` that the index lacks are ignored.
        encode_all: Whether all documents are encoded again, also those with a vector.
        options: Options of the build; None for the defaults. None in `factory`, `store`, `recall`,
            `backend` or `dtype` keeps the value of the active version.
        progress: Whether to show progress bars on standard error.
        **changes: Fields of `IndexOptions` that replace those of `options`.

    Returns:
        The new version, without `encoded` if no document is new; or the active one if nothing
        changes.

    Raises:
        IndexVersionError: If the index has no active version or it is damaged.
        EmbeddingSpaceError: If the pair, backend or data type differ from those of the version.
        CareError: If the update fails for another reason. No version is published.
    """
    given = replace(options or IndexOptions(), **changes)
    base, pair, chosen, settings = active_settings(name, given, progress=progress)
    deleted = Path(delete) if isinstance(delete, str) else delete
    # As of a corpus, ids can be whole numbers.
    ids = deleted if isinstance(deleted, Path | None) else list(map(str, deleted))
    alone = add is None and ids is None and not encode_all
    if alone and _only_components(given, settings, base):
        manifest = update_components(settings, base, pair.document)
        return _version(manifest or base, chosen, built=manifest is not None)
    with corpus_path(add if add is not None else "", chosen.builds) as path:
        settings, encoder = _executor(pair, settings, chosen, cut=bool(base.chunking))
        queries = query_encoder(pair, encoder_options(chosen))
        changed = Changes(path or None, ids, missing_ok, encode_all)
        updated = update(settings, changed, base, encoder, queries)
    if not updated:
        return _version(base, chosen)
    return _version(updated[0], chosen, updated[1], built=True)


def merge_index(
    name: str, *, options: IndexOptions | None = None, progress: bool = False, **changes: Any
) -> IndexVersion:
    """Joins the segments of an index into one and drops deleted documents; encodes nothing.

    The result equals a build of the documents that the index has, in their order.

    Args:
        name: Name of the index.
        options: Options of the build, as of `update_index`.
        progress: Whether to show progress bars on standard error.
        **changes: Fields of `IndexOptions` that replace those of `options`.

    Returns:
        The new version; or the active one if it has one segment and no deleted documents, or
        no documents.

    Raises:
        IndexVersionError: If the index has no active version or it is damaged, or its vectors
            cannot be read.
        CareError: If the merge fails for another reason. No version is published.
    """
    given = replace(options or IndexOptions(), **changes)
    base, pair, chosen, settings = active_settings(name, given, progress=progress)
    if not (base.segments and base.count):
        return _version(base, chosen)
    how = encoder_options(chosen, settings.token_vectors)
    encoders = document_encoder(pair, how), query_encoder(pair, how)
    manifest = merge(settings, base, *encoders)
    return _version(manifest or base, chosen, built=manifest is not None)


def encode_corpus(
    name: str, corpus: Corpus, options: IndexOptions | None = None, *, progress: bool = False
) -> EncodedCorpus:
    """Encodes a corpus into shards, which a later `build_index` of the same corpus uses.

    The arguments and errors are those of `build_index`.
    """
    pair, chosen = _resolve(options or IndexOptions())
    with corpus_path(corpus, chosen.builds) as path:
        settings = _build_options(name, path, chosen, pair, progress=progress)
        return encode(*_executor(pair, settings, chosen, cut=bool(chosen.chunk_tokens)))


def estimate_build(
    name: str,
    corpus: str,
    options: IndexOptions | None = None,
    *,
    tokens_per_second: float | None = None,
) -> tuple[Estimate, EncodingRate]:
    """Estimates tokens, time, disk and memory of a build from a sample; writes nothing.

    Args:
        name: Name of the index.
        corpus: A file, a folder or a glob.
        options: How it would be built.
        tokens_per_second: Encoding rate of a GPU, or None to measure that of this machine.
    """
    pair, chosen = _resolve(options or IndexOptions())
    settings = _build_options(name, corpus, chosen, pair, progress=False)
    needed = settings.chunking or not tokens_per_second
    encoder = document_encoder(pair, encoder_options(chosen)) if needed else None
    chunker = Chunker(encoder, settings.chunking) if encoder and settings.chunking else None
    sample = CorpusSample(settings, chunker)
    estimate = sample.estimate(token_counter(pair, settings.threads), pair.document.dimension)
    if tokens_per_second or not encoder:
        return estimate, EncodingRate(tokens_per_second or 0.0, "GPU", "as given")
    devices = chosen.replicas * chosen.tensor_parallel if chosen.backend == "vllm" else 1
    backend = f"{chosen.backend} ({chosen.dtype})"
    return estimate, measure_rate(encoder, sample.texts, settings.batch_size, devices, backend)


def active_settings(
    name: str, given: IndexOptions, corpus: str = "", *, progress: bool
) -> tuple[IndexManifest, Pair, IndexOptions, BuildOptions]:
    """Returns the active version, and the pair and options with which it is changed."""
    base = active_manifest(IndexWriter(given.indexes, name, vector_stores(given.milvus_uri)))
    pair, chosen = _resolve(_as_before(given, base), base)
    return base, pair, chosen, _build_options(name, corpus, chosen, pair, base, progress=progress)


def _as_before(options: IndexOptions, base: IndexManifest) -> IndexOptions:
    """Returns options of an update; those that are not given are the active version's."""
    store = options.store or base.store
    factory = options.factory
    if store == base.store:
        factory = factory or requested_factory(base)
    recall = options.recall
    if recall is None and base.recall.recall >= base.recall.target:
        recall = base.recall.target
    return replace(
        options,
        store=store,
        factory=factory,
        recall=recall,
        backend=options.backend or cast("Backend", base.backend),
        full_text=_given(options.full_text, FULL_TEXT in base.components),
        token_vectors=_given(options.token_vectors, TOKENS in base.components),
    )


def _given(value: bool | None, default: bool) -> bool:
    return default if value is None else value


def _only_components(given: IndexOptions, settings: BuildOptions, base: IndexManifest) -> bool:
    """Returns whether an update asks for other components, and needs no vector for them."""
    names = ("full_text", "lexical_weight", "terms", "token_vectors")
    asked = any(getattr(given, name) is not None for name in names)
    kept = (
        settings.store == base.store == "faiss"
        and given.factory in (None, base.factory)
        and given.recall in (None, base.recall.target)
        and not (given.queries or given.chunk_tokens)
    )
    only_weight = same_components(base, settings)
    return (
        asked and kept and has_token_vectors(base, settings) and (only_weight or not base.segments)
    )


def _resolve(options: IndexOptions, base: IndexManifest | None = None) -> tuple[Pair, IndexOptions]:
    """Loads the pair and replaces options that are None by values that suit it."""
    pair = load_pair(options.pair)
    backend = resolve_backend(pair.document, options.backend or "auto")
    default = IndexOptions()
    for what, able, names in _ONLY_WITH:
        chosen = backend if what == "backend" else getattr(options, what)
        given = [
            name for name in names if getattr(options, name) not in (getattr(default, name), "auto")
        ]
        if given and chosen not in able:
            flag = f"--{given[0].replace('_', '-')}"
            message = f"{flag} needs --{what} {' or '.join(able)}; the {what} is {chosen}"
            raise CareError(message, code="option_not_taken", option=flag)
    if options.ocr:
        extras.require("ocr")
    if options.chunk_overlap and not options.chunk_tokens:
        message = "--chunk-overlap needs --chunk-tokens"
        raise CareError(message, code="option_not_taken", option="--chunk-overlap")
    if options.token_vectors and backend != "onnx":
        message = f"--token-vectors needs --backend onnx; the backend is {backend}"
        raise CareError(message, code="option_not_taken", option="--token-vectors")
    same = base is not None and base.backend == backend
    dtype = options.dtype or (base.dtype if base and same else "auto")
    full_text = options.full_text is not False
    for name in ("lexical_weight", "terms"):
        if getattr(options, name) is not None and not full_text:
            flag = f"--{name.replace('_', '-')}"
            message = f"{flag} needs full text: leave out --no-full-text"
            message += ", or add --full-text if the index has none"
            raise CareError(message, code="option_not_taken", option=flag)
    resolved = replace(
        options,
        full_text=full_text,
        store=options.store or "faiss",
        threads=options.threads or available_cpus(),
        backend=cast("Backend", backend),
        dtype=cast("Dtype", resolve_dtype(backend, dtype)),
        batch_size=options.batch_size or default_batch_size(backend),
    )
    return pair, resolved


def _build_options(
    name: str,
    corpus: str,
    options: IndexOptions,
    pair: Pair,
    base: IndexManifest | None = None,
    *,
    progress: bool,
) -> BuildOptions:
    """Returns the options of a build, or of an update of the version `base`."""
    shared = {field.name for field in fields(BuildOptions)} - {"executor"}
    given = {key: value for key, value in asdict(options).items() if key in shared}
    if options.backend == "openai":
        # A server forms its own batches: a build can resume with requests of another size.
        given["batch_size"] = _SERVER_TEXTS
    chunking = None
    if options.chunk_tokens:
        chunking = Chunking(tokens=options.chunk_tokens, overlap=options.chunk_overlap)
    return BuildOptions(
        **given | {"terms": _terms(options, base), "token_vectors": _token_vectors(pair, options)},
        fusion=_fusion(pair, options, base),
        corpus=corpus,
        name=name,
        fields=_field_names(options),
        progress=progress,
        chunking=chunking,
        stores=vector_stores(options.milvus_uri),
    )


def _field_names(options: IndexOptions) -> FieldNames:
    metadata = options.metadata_fields
    names = None if metadata is None else tuple(filter(None, map(str.strip, metadata.split(","))))
    return FieldNames(options.id_field, options.title_field, options.text_field, names)


def _fusion(
    pair: Pair, options: IndexOptions, base: IndexManifest | None = None
) -> Mapping[str, float]:
    """Returns how a hybrid search of the new version fuses its channels; empty if not measured."""
    if options.lexical_weight is not None:
        return {"lexical": options.lexical_weight} if options.lexical_weight else {}
    if base and FULL_TEXT in base.components:
        return base.fusion
    return {str(name): value for name, value in pair.fusion.items()}


def _terms(options: IndexOptions, base: IndexManifest | None = None) -> TermList | None:
    """Reads the term list of the new version: the given one, or that of the active version."""
    if options.terms is not None:
        given = term_list(options.terms)
        return given if given.terms else None
    if base is None or not options.full_text:
        return None
    folder = IndexFolder(options.indexes, base.name)
    return read_terms(folder.version(base.base), base, GIVEN)


def _token_vectors(pair: Pair, options: IndexOptions) -> TokenVectorSpec | None:
    """Returns what the token vectors of the new version are, None without them."""
    if not options.token_vectors:
        return None
    if pair.late_interaction is None:
        message = (
            f"pair '{pair.name}' computes no token vectors: leave out --token-vectors, or use "
        )
        message += "a pair that care late-interaction export has written"
        raise PairError(message, code="no_token_output", model=pair.name)
    return pair.late_interaction.stored


def encoder_options(
    options: IndexOptions, token_vectors: TokenVectorSpec | None = None
) -> EncoderOptions:
    """Returns the options of the encoders of a pair."""
    names = {f.name for f in fields(EncoderOptions)} & {f.name for f in fields(options)}
    names -= {"token_vectors"}
    shared = {name: getattr(options, name) for name in names}
    return EncoderOptions(**shared, token_vectors=token_vectors)


def _executor(
    pair: Pair, settings: BuildOptions, options: IndexOptions, *, cut: bool
) -> tuple[BuildOptions, Encoder]:
    """Returns options with the executor and the document encoder.

    With Ray the encoder runs in actors; the driver loads it only to cut documents into chunks.
    """
    load = partial(document_encoder, pair, encoder_options(options, settings.token_vectors))
    if options.executor == "local":
        return settings, load()
    try:
        from indexer.ray_executor import RayExecutor, RemoteEncoder
    except ModuleNotFoundError as error:
        message = f"--executor ray needs {error.name}: pip install 'care-retrieval[distributed]'"
        raise ProviderError(message, code="not_installed", package=error.name) from error
    on_gpus = pair.document.format != "onnx" and options.backend != "openai"
    executor = RayExecutor(
        load,
        settings.batch_size,
        address=options.ray_address,
        actors=options.ray_actors,
        threads=settings.threads,
        gpus=options.replicas * options.tensor_parallel if on_gpus else 0,
    )
    encoder = load() if cut else RemoteEncoder(pair.document)
    return replace(settings, executor=executor), encoder


def _version(
    manifest: IndexManifest,
    options: IndexOptions,
    encoded: EncodedCorpus | None = None,
    *,
    built: bool = False,
) -> IndexVersion:
    folder = options.indexes / manifest.name / manifest.version
    return IndexVersion(manifest, folder, encoded, built)
