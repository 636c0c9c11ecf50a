"""Checks of a query against an index, the same over HTTP and in Python."""

from dataclasses import dataclass, replace

from core.errors import QueryError
from core.text import normalize_text
from core.types import DOCUMENT, NO_CONDITIONS, Conjunction, HitLimit, Query
from search.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class QueryLimits:
    """Limits of a query, and what reranks beside late interaction."""

    chars: int  # longest text [characters]
    top_k: int
    rerank: int  # largest number of hits that are ranked again
    rerank_default: int  # how many are ranked again if the query does not say
    server: bool = False  # whether a server ranks them


def checked_query(
    snapshot: Snapshot, query: Query, limits: QueryLimits, within: Conjunction = NO_CONDITIONS
) -> Query:
    """Returns the query as it is searched: under the text rules, within the index's size.

    `within` bounds the documents: for the query the index has no others. All that searches, shares
    or caches the query reads it from its conditions.

    Raises:
        QueryError: If the text is empty or too long, `top_k` is too large, the filter is not
            valid for the index, it has no field of the name in `limit_per`, or hits cannot be
            ranked again, or not as many. Names of fields are not checked under `within`.
    """
    text = check_text(query.text, limits.chars)
    if query.top_k > limits.top_k:
        message = f"is {query.top_k}; the limit is {limits.top_k}"
        raise QueryError("top_k", message, code="top_k_too_large", limit=limits.top_k)
    conditions = snapshot.segment.filters.check(query.filter, within)
    # Queries that are searched alike are one for the caches: an index returns at most its number
    # of documents, and without chunks every document is collapsed.
    top_k = min(query.top_k, snapshot.most_hits)
    collapse = query.collapse and snapshot.segment.documents.chunked
    mode = query.mode or snapshot.modes[0]
    if mode not in snapshot.modes:
        message = (
            f"is {mode}, but index '{snapshot.manifest.name}' has no full text: add it "
            "(care update --full-text)"
        )
        raise QueryError("mode", message, code="mode_not_available")
    return replace(
        query,
        text=text,
        top_k=top_k,
        filter={},
        collapse=collapse,
        mode=mode,
        limit_per=_checked_limit(snapshot, query.limit_per, top_k, bounded=bool(within)),
        rerank=_checked_rerank(snapshot, query, limits, top_k),
        conditions=conditions,
    )


def _checked_rerank(snapshot: Snapshot, query: Query, limits: QueryLimits, top_k: int) -> int:
    """Returns how many hits are ranked again: all hits are, so that their scores compare."""
    if query.rerank == 0:
        return 0
    if not limits.server and snapshot.late is None:
        message = (
            f"needs token vectors that index '{snapshot.manifest.name}' and the pair have in "
            "common (care index --token-vectors), or a server (CARE_RERANK_URL)"
        )
        raise QueryError("rerank", message, code="rerank_not_available")
    wanted = max(limits.rerank_default if query.rerank is None else query.rerank, top_k)
    if wanted > limits.rerank:
        message = f"would rank {wanted} hits again; the limit is {limits.rerank}"
        raise QueryError("rerank", message, code="rerank_too_large", limit=limits.rerank)
    return min(wanted, snapshot.most_hits)


def _checked_limit(
    snapshot: Snapshot, limit: HitLimit | None, top_k: int, *, bounded: bool
) -> HitLimit | None:
    """Returns the limit, or None if it has no effect."""
    if limit is None:
        return None
    if limit.field != DOCUMENT:
        if not bounded:
            snapshot.segment.filters.check_field(limit.field, "limit_per.field")
    elif not snapshot.segment.documents.chunked:
        return None
    return limit if limit.hits < top_k else None


def check_text(text: str, limit: int, field: str = "query") -> str:
    """Returns a text under the text rules; QueryError if it is empty or longer than `limit`."""
    if len(text) > limit:
        message = f"has {len(text)} characters; the limit is {limit}"
        raise QueryError(field, message, code="text_too_long", limit=limit)
    normal = normalize_text(text)
    if not normal:
        raise QueryError(field, "is empty", code="empty_text")
    return normal
