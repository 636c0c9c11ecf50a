"""Scores of an index on judged queries."""

import asyncio
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import SecretStr

from care.extras import require
from care.options import EvaluationOptions, setting
from care.search import load_with_encoder, open_index
from core.breaker import Breaker, UnavailableError
from core.choices import DEFAULT_PAIR, DEFAULT_QUERY_CHARS
from core.errors import CareError, PairError
from core.types import FloatArray, Mode
from models.encoders.factory import sentence_model
from models.pairs import PAIR, load_pair

if TYPE_CHECKING:
    from core.encoders import Pair
    from evaluation.comparison import Comparison
    from evaluation.index_evaluation import IndexEvaluation, System
    from evaluation.index_search import Reranker

# How long a server may take to rank the hits of a query again [ms].
_RERANK_TIMEOUT = 60_000


def evaluate(
    name: str,
    *,
    queries: str | Path,
    qrels: str | Path,
    pair: str | None = None,
    indexes: str | Path | None = None,
    milvus_uri: str | None = None,
    mode: Mode | None = None,
) -> dict[str, float]:
    """Scores the active version of an index on judged queries.

    An index of chunks is scored by documents. If judged documents are not in the index, a
    `UserWarning` counts them. `care evaluate` compares the modes with BM25 and suggests a
    `min_score`.

    Example:
        >>> care.evaluate("mine", queries="queries.jsonl", qrels="qrels/test.tsv")["nDCG@10"]

    Args:
        name: Name of the index.
        queries: JSONL file with `_id` and `text`.
        qrels: TSV file with query-id, corpus-id and score; only its queries are searched.
        pair: As in `open_index`.
        indexes: As in `open_index`.
        milvus_uri: As in `open_index`.
        mode: "dense", "lexical" or "hybrid"; None for the default of the index.

    Returns:
        Means over the judged queries: nDCG@10, MRR@10, Recall@10 and Recall@100.

    Raises:
        DataError: If a file is wrong, the judgements reference an unknown query, or a judged query
            is empty or has more than 2,000 characters.
        CareError: If the index cannot be opened (see `open_index`), or the packages of evaluation
            are not installed.
        QueryError: If the index has no full text, which the mode needs.
    """
    require("eval")
    from evaluation.beir import read_judged_queries
    from evaluation.index_evaluation import TOP_K, judgement_coverage
    from evaluation.metrics import score

    judged, judgements = read_judged_queries(Path(queries), Path(qrels), DEFAULT_QUERY_CHARS)
    with open_index(name, pair=pair, indexes=indexes, milvus_uri=milvus_uri) as index:
        if warning := judgement_coverage(judgements, index.documents()).warning(name):
            warnings.warn(warning, stacklevel=2)
        found = index.search_many(list(judged.values()), TOP_K, collapse=True, mode=mode)
    run = {
        id_: {hit.parent or hit.id: hit.score for hit in hits}
        for id_, hits in zip(judged, found, strict=True)
    }
    return score(judgements, run)


def compare_modes(name: str, options: EvaluationOptions) -> "IndexEvaluation":
    """Scores each mode of an index, BM25, further pairs and runs; what `care evaluate` prints."""
    from evaluation.index_evaluation import evaluate_index

    if options.queries is None:
        raise ValueError("an index is searched with queries")
    first, *further = options.pairs or [setting("CARE_PAIR", str, DEFAULT_PAIR)]
    loaded = load_pair(first)
    weights = [float(part) for part in (options.weights or "").split(",") if part]
    with _rerank_server(options.rerank_url, options.rerank_model) as server:
        return evaluate_index(
            lambda: load_with_encoder(name, loaded, options.indexes),
            loaded.name,
            options.queries,
            options.qrels,
            weights,
            server,
            options.max_query_chars,
            _systems(further, options.runs or [], options.cache),
        )


def compare_files(runs: Sequence[Path], qrels: Path) -> "Comparison":
    """Scores runs of other systems by judgements; differences are to the first run."""
    from evaluation.beir import read_qrels
    from evaluation.comparison import compare_runs

    judgements, systems = read_qrels(qrels), _systems([], runs)
    found = {name: run([], {}, judgements) for name, run in systems.items()}
    return compare_runs(judgements, found, str(runs[0]))


def _systems(
    pairs: Sequence[str], runs: Sequence[Path], cache: Path = Path()
) -> "dict[str, System]":
    """Returns pairs, and runs that were read from files, as systems by name."""
    from evaluation.dense import pair_run
    from evaluation.index_evaluation import TOP_K
    from evaluation.metrics import read_run

    systems: dict[str, System] = {}

    def add(name: str, system: "System") -> None:
        if name in systems:
            message = f"another system has the name '{name}' too: give each of them once"
            raise CareError(message, code="duplicate_system", system=name)
        systems[name] = system

    for path in runs:
        read = read_run(path)
        add(str(path), lambda *_, read=read: read)
    for given in pairs:
        loaded = _pair_or_model(given)
        add(loaded.name, partial(pair_run, loaded, depth=TOP_K, cache=cache))
    return systems


def _pair_or_model(name: str) -> "Pair":
    """Returns a pair, by its name, file or folder, or a model of sentence-transformers."""
    folder = Path(name)
    if (folder / PAIR).is_file():
        return load_pair(str(folder / PAIR))
    try:
        return load_pair(name)
    except PairError as error:
        other = folder.is_dir() or ("/" in name and not name.endswith(".toml"))
        if error.code != "unknown_pair" or not other:
            raise
    return sentence_model(name)


@contextmanager
def _rerank_server(url: str | None, model: str) -> "Iterator[Reranker | None]":
    """Yields what lets a server score texts for a query; None without an address."""
    if url is None:
        yield None
        return
    from service.app import make_reranker
    from service.settings import Settings

    chosen = Settings.model_construct(
        rerank_url=SecretStr(url),
        rerank_model=model,
        rerank_key=SecretStr(setting("CARE_RERANK_KEY", str, "")),
        rerank_truncate_tokens=setting("CARE_RERANK_TRUNCATE_TOKENS", int, None),
        rerank_timeout_ms=_RERANK_TIMEOUT,
    )
    server = make_reranker(chosen, Breaker())

    def scores(query: str, texts: Sequence[str]) -> FloatArray:
        try:
            return runner.run(server.scores(query, texts))
        except UnavailableError as error:
            message = f"the server of --rerank-url did not rank the hits of a query: {error}"
            raise CareError(message, code="search_failed") from None

    with asyncio.Runner() as runner:
        yield scores
        runner.run(server.close())
