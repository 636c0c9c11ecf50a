"""Searching an index in this process, with the checks and the results of the service."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Self

from pydantic import ValidationError

from care.options import Location, setting, several, vector_stores
from core.choices import DEFAULT_PAIR
from core.encoders import Encoder, Pair
from core.errors import CareError, QueryError
from core.types import Document, Filter, Hit, Mode, Query
from core.versions import IndexFolder, read_manifest, with_version
from models.encoders.factory import EncoderOptions, query_encoder
from models.pairs import load_pair
from search.query import QueryLimits, checked_query
from search.snapshot import Snapshot, check_space, load_index
from search.task import SearchTask, encode
from service.schemas import SearchRequest
from service.settings import Settings

_LIMITS = QueryLimits(
    *(
        Settings.model_fields[name].default
        for name in ("max_query_chars", "max_top_k", "max_rerank", "rerank_hits")
    )
)
_BATCH = 32


def open_index(
    name: str,
    *,
    pair: str | None = None,
    indexes: Path | str | None = None,
    milvus_uri: str | None = None,
    threads: int = 1,
) -> "SearchIndex":
    """Opens the active version of an index, and the query encoder of a pair, for search.

    Files are verified by their checksums; canaries verify that encoder and index share one
    embedding space. The version stays open until the `with` block ends, even if another version
    becomes active, for example by `update_index`: `SearchIndex.reload` opens that one.

    Example:
        >>> with care.open_index("mine") as index:
        ...     for hit in index.search("血压高吃什么", top_k=5):
        ...         print(hit.rank, hit.score, hit.title)

    Args:
        name: Name of the index.
        pair: Trained or registered pair, or path of a pair's TOML file; by default `CARE_PAIR` or
            "care-mini".
        indexes: Folder of all indexes; by default `CARE_INDEXES` or "indexes".
        milvus_uri: Address of Milvus, if it has the index; by default `CARE_MILVUS_URI`.
        threads: Threads that encode a query.

    Raises:
        IndexVersionError: If the index has no active version or it is damaged.
        EmbeddingSpaceError: If index and query encoder do not share one embedding space.
        PairError: If the pair is unknown or its files are wrong.
    """
    chosen = load_pair(pair or setting("CARE_PAIR", str, DEFAULT_PAIR))
    root = Path(indexes or Location().indexes)
    load = partial(load_with_encoder, name, chosen, root, milvus_uri, threads)
    return SearchIndex(IndexFolder(root, name), load)


def load_with_encoder(
    name: str,
    pair: Pair,
    indexes: Path | str | None = None,
    milvus_uri: str | None = None,
    threads: int = 1,
    encoder: Encoder | None = None,
) -> tuple[Snapshot, Encoder]:
    """Loads the active version of an index and the query encoder of a pair, as `open_index`.

    An `encoder` that is given is not loaded again.
    """
    default = Location()
    index = IndexFolder(Path(indexes or default.indexes), name)
    milvus = milvus_uri or default.milvus_uri
    stores = vector_stores(milvus)
    if milvus and not index.path.exists():  # it may be in Milvus
        stores.get("milvus").active_version(index)
    manifest = with_version(index.active, lambda version: read_manifest(index.version(version)))
    # Before the encoder is loaded, which may download it.
    check_space(manifest, pair.query)
    encoder = encoder or query_encoder(pair, EncoderOptions(threads=threads))
    store = stores.get(manifest.store)
    return load_index(index, encoder, store, pair=pair), encoder


class SearchHits(list[Hit]):
    """The hits of a query, best first, and whether the index seems to answer it.

    Attributes:
        mode: The mode of the search.
        reranked: Whether the hits were ranked again.
        answerable: Whether the index seems to answer the query, from 0 to 1; None if the pair has
            no calibration for the mode, or no document matches the filter.
        threshold: The score below which nothing in the index seems to answer; None without a
            calibration.
    """

    def __init__(
        self,
        hits: Iterable[Hit],
        mode: Mode | None,
        answerable: float | None,
        threshold: float | None,
        *,
        reranked: bool,
    ) -> None:
        super().__init__(hits)
        self.mode = mode
        self.reranked = reranked
        self.answerable = answerable
        self.threshold = threshold

    @property
    def unanswered(self) -> bool:
        """Whether nothing in the index seems to answer the query; False if that is unknown."""
        if self.answerable is None or self.threshold is None:
            return False
        return self.answerable < self.threshold


class SearchIndex:
    """An open index version; a context manager. Made by `open_index`."""

    def __init__(self, folder: IndexFolder, load: Callable[..., tuple[Snapshot, Encoder]]) -> None:
        self._folder = folder
        self._load = load
        self._loaded: Snapshot | None
        self._loaded, self._encoder = load()

    @property
    def name(self) -> str:
        """Name of the index."""
        return self._open.manifest.name

    @property
    def version(self) -> str:
        """Id of the index version."""
        return self._open.manifest.version

    @property
    def chunked(self) -> bool:
        """Whether hits are chunks of documents."""
        return bool(self._open.segment.documents.chunked)

    @property
    def modes(self) -> tuple[Mode, ...]:
        """Modes that `search` accepts, the default first."""
        return self._open.modes

    @property
    def filter_fields(self) -> list[str]:
        """Metadata fields that `filter` accepts, sorted."""
        return sorted(self._open.segment.filters.fields)

    def __len__(self) -> int:
        """Returns the number of documents or, if they are split, of chunks."""
        return self._open.manifest.count

    def search(
        self,
        query: str,
        top_k: int = 10,
        *,
        filter: Filter | None = None,
        min_score: float | None = None,
        collapse: bool = False,
        mode: Mode | None = None,
        explain: bool = False,
        evidence: bool = False,
        limit_per: Mapping[str, str | int] | None = None,
        rerank: bool | int = False,
    ) -> SearchHits:
        """Returns the documents nearest to a query, as `POST /search` does, best first.

        Args:
            query: The question, at most 2000 characters.
            top_k: Number of hits, 1 to 1000.
            filter: Conditions by metadata field, all of which must hold: a value or a list of
                accepted values, or an object with the bounds `gt`, `gte`, `lt` and `lte` of a
                number, and values that are `not` accepted. For example `{"department": ["儿科",
                "骨科"], "year": {"gte": 2019}, "source": {"not": "论坛"}}`.
            min_score: Lowest score of a hit, in the scale of the mode.
            collapse: Whether each document is returned once, by its best chunk.
            mode: "dense" (vectors), "lexical" (full text) or "hybrid" (both); None for the default
                of the index.
            explain: Whether hits of a hybrid search say what each channel contributes.
            evidence: Whether hits have the sentence that answers best.
            limit_per: At most `hits` hits of each value of a metadata field, or of each document of
                an index of chunks: `{"field": "department", "hits": 2}`, `{"field": "_document",
                "hits": 3}`.
            rerank: Whether the first 50 hits are ranked again by late interaction, or how many are,
                at most 200. Pair and index must have token vectors.

        Raises:
            QueryError: If the query is empty or too long, a number is out of range, or the filter
                or the limit is not valid for the index. `error.field` names the argument.
        """
        how: dict[str, object] = {"top_k": top_k, "filter": filter, "min_score": min_score}
        how |= {"collapse": collapse, "mode": mode, "explain": explain, "evidence": evidence}
        how |= {"limit_per": limit_per, "rerank": rerank}
        return self._search([("", query)], how)[0]

    def search_many(
        self,
        queries: Sequence[str],
        top_k: int = 10,
        *,
        filter: Filter | None = None,
        min_score: float | None = None,
        collapse: bool = False,
        mode: Mode | None = None,
        explain: bool = False,
        evidence: bool = False,
        limit_per: Mapping[str, str | int] | None = None,
        rerank: bool | int = False,
    ) -> list[SearchHits]:
        """Returns the hits of each query, in the order of the queries.

        Queries are encoded in batches; arguments and errors are those of `search`, and
        `error.field` also names the position of a query, as in `queries.3.query`.
        """
        how: dict[str, object] = {"top_k": top_k, "filter": filter, "min_score": min_score}
        how |= {"collapse": collapse, "mode": mode, "explain": explain, "evidence": evidence}
        how |= {"limit_per": limit_per, "rerank": rerank}
        listed = enumerate(several(queries, "queries"))
        return self._search([(f"queries.{n}.", query) for n, query in listed], how)

    def _search(
        self, queries: Sequence[tuple[str, str]], how: Mapping[str, object]
    ) -> list[SearchHits]:
        """Returns the hits of queries, each with its place in errors."""
        snapshot = self._open
        shared = {**how, "filter": how["filter"] or {}}
        checked = []
        for place, query in queries:
            try:
                asked = _query({"query": query, **shared})
                checked.append(checked_query(snapshot, asked, _LIMITS))
            except QueryError as error:
                raise error.of(place) from None
        hits: list[SearchHits] = []
        for start in range(0, len(checked), _BATCH):
            batch = checked[start : start + _BATCH]
            tasks = [SearchTask(snapshot=snapshot, query=query) for query in batch]
            encode(tasks, self._encoder)
            hits += map(_hits, tasks)
        return hits

    def passages(self, id: str | int) -> list[Document]:
        """Returns the document or chunk with an id, or all chunks of a split document, in order.

        Args:
            id: Id of a hit, of its `parent`, or of any document.

        Raises:
            CareError: If no document or chunk has the id (`unknown_document`).
        """
        documents = self._open.segment.documents
        rows = documents.find(str(id))  # as of a corpus, ids can be whole numbers
        if not rows:
            message = f"no document or chunk of index '{self.name}' has this id"
            raise CareError(message, code="unknown_document", index=self.name)
        return [stored.document() for stored in documents.read(rows)]

    def documents(self) -> Iterator[Document]:
        """Yields the documents or, if they are split, the chunks, in the order of the corpus."""
        return iter(self._open.segment.documents)

    def reload(self) -> bool:
        """Opens the version that is active now, and returns whether it is another one.

        Searches that run meanwhile end in the version that they began in. If the active version
        cannot be opened, the errors are those of `open_index`, and the open one stays.
        """
        before = self._open.identity
        if self._folder.active() == self.version:
            return False
        self._loaded, _ = self._load(encoder=self._encoder)
        return self._loaded.identity != before

    def close(self) -> None:
        """Releases the files of the version."""
        self._loaded = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._loaded is None:
            return f"SearchIndex('{self._folder.name}', closed)"
        kind = "chunks" if self.chunked else "documents"
        return f"SearchIndex('{self.name}', '{self.version}', {len(self)} {kind})"

    @property
    def _open(self) -> Snapshot:
        if self._loaded is None:
            raise CareError("the index is closed", code="index_closed")
        return self._loaded


def _hits(task: SearchTask) -> SearchHits:
    result, mode = task.search(), task.query.mode
    threshold = task.snapshot.answerable_thresholds.get(mode) if mode else None
    reranked = bool(task.query.rerank) and "rerank" not in result.failed
    return SearchHits(result.hits, mode, result.entry.answerable, threshold, reranked=reranked)


def _query(fields: Mapping[str, object]) -> Query:
    """Returns a query that `POST /search` would accept."""
    try:
        body = SearchRequest.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        field = ".".join(str(part)[:64] for part in first["loc"])
        raise QueryError(field, first["msg"], code=first["type"]) from None
    return body.as_query()
