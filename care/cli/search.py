"""`care search` searches an index in this process, without a server."""

import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from care.cli.options import Json, OnlyIndex, index_name, takes_fields
from care.cli.output import show
from care.options import Location, PairName
from core.choices import DEFAULT_PAIR, Mode

if TYPE_CHECKING:
    from care.search import SearchHits, SearchIndex
    from core.types import FilterValue

_TEXT_CHARS = 72
_CONDITION = re.compile(r"(?P<field>[^=<>]+?)(?P<sign>!=|>=|<=|=|>|<)(?P<value>.*)", re.DOTALL)
_BOUNDS = {">": "gt", ">=": "gte", "<": "lt", "<=": "lte"}


@takes_fields
def search(
    query: Annotated[str, Argument(metavar="QUERY", help="The question.", show_default=False)],
    index: OnlyIndex = None,
    top_k: Annotated[int, Option(help="Number of hits, 1 to 1000.")] = 10,
    filter_: Annotated[
        list[str] | None,
        Option(
            "--filter",
            metavar="FIELD=VALUE",
            help="Only documents whose metadata has this value; FIELD!=VALUE: only those that do "
            "not; FIELD>=NUMBER, >, < or <=: only numbers in this range. May be repeated: values "
            "after = are alternatives, and all else must match.",
        ),
    ] = None,
    min_score: Annotated[
        float | None,
        Option(metavar="SCORE", help="Lowest score of a hit; `care evaluate` suggests one."),
    ] = None,
    collapse: Annotated[
        bool, Option("--collapse", help="Return each document once, by its best chunk.")
    ] = False,
    mode: Annotated[
        Mode | None,
        Option(
            help="Search by vectors (dense), full text (lexical) or both (hybrid) (default: as the "
            "index says).",
            show_default=False,
        ),
    ] = None,
    explain: Annotated[
        bool, Option("--explain", help="Show what each channel contributes to a score.")
    ] = False,
    evidence: Annotated[
        bool,
        Option("--evidence", help="Show the sentence of each hit that answers QUERY best."),
    ] = False,
    limit_per: Annotated[
        str | None,
        Option(
            metavar="FIELD=HITS",
            help="At most HITS hits of each value of a metadata field, or of each document of an "
            "index of chunks (_document=HITS).",
            show_default=False,
        ),
    ] = None,
    rerank: Annotated[
        int,
        Option(
            metavar="HITS",
            min=0,
            help="Rank this many of the first hits again by late interaction, if pair and index "
            "have token vectors; 0 for none.",
        ),
    ] = 0,
    pair: PairName = DEFAULT_PAIR,
    *,
    where: Location,
    json_: Json = False,
) -> None:
    """Search an index without a server; the results are those of POST /search."""
    accepted, limit = filter_of(filter_ or []), _limit(limit_per)
    from care.search import open_index

    with open_index(index_name(index, where.indexes), pair=pair, **asdict(where)) as opened:
        started = time.perf_counter()
        how: dict[str, Any] = {"min_score": min_score, "collapse": collapse, "explain": explain}
        how |= {"evidence": evidence, "limit_per": limit, "rerank": rerank or False}
        hits = opened.search(query, top_k, filter=accepted, mode=mode, **how)
        seconds = time.perf_counter() - started
        response = _response(opened, hits, seconds, evidence=evidence)
        show(response, _lines(hits, seconds), as_json=json_)


def filter_of(arguments: Sequence[str]) -> "dict[str, Any]":
    """Returns the conditions of a filter by field."""
    accepted: dict[str, list[FilterValue]] = {}
    conditions: dict[str, dict[str, Any]] = {}
    for argument in arguments:
        match = _CONDITION.fullmatch(argument)
        if not match:
            raise typer.BadParameter(f"'{argument}' is not FIELD=VALUE", param_hint="--filter")
        field, sign, values = match["field"], match["sign"], _values(match["value"])
        if sign == "=":
            accepted.setdefault(field, []).extend(values)
        elif sign == "!=":
            conditions.setdefault(field, {}).setdefault("not", []).extend(values)
        elif len(values) == 2 and not isinstance(values[1], bool):
            bounds, name = conditions.setdefault(field, {}), _BOUNDS[sign]
            tighter = max if sign[0] == ">" else min
            bounds[name] = tighter(values[1], bounds.get(name, values[1]))
        else:
            raise typer.BadParameter(f"'{argument}' needs a number", param_hint="--filter")
    if both := accepted.keys() & conditions.keys():
        message = f"'{min(both)}' has both = and other conditions"
        raise typer.BadParameter(message, param_hint="--filter")
    return accepted | conditions


def _limit(argument: str | None) -> dict[str, str | int] | None:
    """Returns the limit of hits per document or value."""
    if argument is None:
        return None
    field, sign, hits = argument.rpartition("=")
    if not (sign and field and re.fullmatch(r"-?\d{1,9}", hits)):
        raise typer.BadParameter(f"'{argument}' is not FIELD=HITS", param_hint="--limit-per")
    return {"field": field, "hits": int(hits)}


def _values(text: str) -> "list[FilterValue]":
    """Returns the values that a text of a command line stands for.

    Metadata can hold "1", 1 and true; a command line has text alone. A value that is also a number
    or a boolean stands for both, and an index returns what it has.
    """
    try:
        value = json.loads(text, parse_constant=str)
    except ValueError:
        return [text]
    return [text, value] if isinstance(value, int | float) else [text]


def _response(
    index: "SearchIndex", hits: "SearchHits", seconds: float, *, evidence: bool
) -> dict[str, Any]:
    """Returns the hits as `POST /search` does."""
    chunk = ("parent", "chunk", "chunks") if index.chunked else ()
    why = ("explain",) if any(hit.explain for hit in hits) else ()
    quoted = ("evidence",) if evidence else ()
    fields = ("id", "score", "rank", "title", "text", "metadata", *chunk, *why, *quoted)
    return {
        "hits": [{field: made[field] for field in fields} for made in map(asdict, hits)],
        "index": {"name": index.name, "version": index.version},
        "timings_ms": {"total": round(seconds * 1000, 3)},
        "mode": hits.mode,
        "cached": False,
        "overflow": False,
        "failed_channels": [],
        "reranked": hits.reranked,
        "answerable": hits.answerable,
    }


def _lines(hits: "SearchHits", seconds: float) -> Iterator[str]:
    if hits.unanswered:
        compared = f"answerable {hits.answerable:.3f} is below {hits.threshold:.3f}"
        yield f"nothing in this index seems to answer the question: {compared}"
    for hit in hits:
        metadata = ", ".join(f"{field}: {_shown(value)}" for field, value in hit.metadata.items())
        yield f"{hit.rank:>3}. {hit.score:.3f}  {hit.title or hit.id}"
        text = " ".join((hit.evidence.text if hit.evidence else hit.text).split())
        yield f"     {text[:_TEXT_CHARS]}{'…' if len(text) > _TEXT_CHARS else ''}"
        yield f"     [{hit.id}] {metadata}".rstrip()
        for channel, part in (hit.explain or {}).items():
            if part["rank"]:
                yield f"     {channel} {part['score']:.3f} × {part['weight']:g}, #{part['rank']}"
    yield f"{len(hits)} hit{'s' * (len(hits) != 1)} in {seconds * 1000:.1f} ms"


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
