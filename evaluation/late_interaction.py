"""Reranking by late interaction: nDCG@10 by the bytes that a passage's token vectors take.

Candidates are the nearest documents by cosine and the best by BM25. They are ranked by
cosine + late · MaxSim + bm25 · BM25 ÷ the largest BM25 of the query. The two weights are chosen on
other queries than those that are measured.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.errors import CareError
from core.rows import blocks
from core.types import Document, FloatArray
from evaluation.beir import Qrels, Run
from evaluation.bm25 import Bm25Index
from evaluation.dense import dense_run
from evaluation.metrics import NDCG_10, score_queries
from evaluation.statistics import Difference, paired_difference
from models.encoders.onnx import OnnxEncoder
from models.late_interaction import (
    Codec,
    bytes_per_token,
    decode_tokens,
    encode_tokens,
    max_sim,
    pool_tokens,
)

DEPTH = 60
# Weights that are compared.
LATE = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BM25 = (0.0, 0.03, 0.06, 0.1, 0.15, 0.2)
_BATCH = 32

TokenVectors = Mapping[str, NDArray[np.floating[Any]]]


@dataclass(frozen=True, slots=True)
class Candidates:
    """Candidates of one query."""

    ids: list[str]  # of documents
    cosines: FloatArray  # float32 [candidates]
    bm25: FloatArray  # float32 [candidates], BM25 ÷ the largest BM25 of the query


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of MaxSim and of BM25 in the score."""

    late: float
    bm25: float


@dataclass(frozen=True, slots=True)
class Encoded:
    """Texts by id."""

    vectors: FloatArray  # float32 [texts, dimension], in the order of `tokens`
    tokens: dict[str, NDArray[np.float16]]  # token vectors of each text, float16 [tokens, k]


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table."""

    ranking: str  # what ranks the candidates
    pooling: int  # tokens per stored vector
    codec: str  # how a vector is stored; "" without token vectors
    bytes_per_passage: float  # mean size of the token vectors of a passage
    weights: Weights  # the chosen weights
    ndcg: float  # nDCG@10
    gain: Difference  # difference of nDCG@10 to the ranking by cosine


def encode(encoder: OnnxEncoder, texts: Mapping[str, str]) -> Encoded:
    """Encodes texts, given by id, with their token vectors, in batches of similar length."""
    ids = sorted(texts, key=lambda id_: len(texts[id_]))
    vectors: dict[str, FloatArray] = {}
    tokens: dict[str, NDArray[np.float16]] = {}
    for rows in blocks(len(ids), _BATCH):
        found = encoder.tokenize([texts[id_] for id_ in ids[rows]])
        encoding, states = encoder.encode_token_vectors(found)
        vectors |= zip(ids[rows], encoding.vectors, strict=True)
        tokens |= zip(ids[rows], (state.astype(np.float16) for state in states), strict=True)
    return Encoded(np.stack([vectors[id_] for id_ in texts]), {id_: tokens[id_] for id_ in texts})


def find_candidates(
    queries: Mapping[str, str],
    query_vectors: FloatArray,
    documents: Mapping[str, str],
    document_vectors: FloatArray,
    depth: int = DEPTH,
) -> dict[str, Candidates]:
    """Returns the candidates of each query: the first `depth` by cosine and by BM25.

    Texts are given by id; vectors, float32 [n, dimension] of unit norm, have the same order.
    """
    rows = {id_: row for row, id_ in enumerate(documents)}
    corpus = (Document(id_, text) for id_, text in documents.items())
    bm25 = Bm25Index(corpus, "characters")
    nearest = dense_run(queries, query_vectors, documents, document_vectors, depth)
    found = {}
    for (id_, text), vector, words in zip(
        queries.items(), query_vectors, bm25.search(list(queries.values()), depth), strict=True
    ):
        ids = list(dict.fromkeys([*nearest[id_], *words]))
        scores = np.array(list(bm25.score(text, ids).values()), dtype=np.float32)
        cosines = document_vectors[[rows[document] for document in ids]] @ vector
        found[id_] = Candidates(ids, cosines, scores / max(float(scores.max()), 1e-9))
    return found


def rerank(
    candidates: Mapping[str, Candidates], late: Mapping[str, FloatArray], weights: Weights
) -> Run:
    """Returns the run of a score; `late` has the MaxSim of each query's candidates."""
    run = {}
    for id_, found in candidates.items():
        scores = found.cosines + weights.late * late[id_] + weights.bm25 * found.bm25
        run[id_] = dict(zip(found.ids, scores.tolist(), strict=True))
    return run


def choose_weights(
    qrels: Qrels,
    candidates: Mapping[str, Candidates],
    late: Mapping[str, FloatArray],
    weights: Sequence[Weights],
) -> Weights:
    """Returns the weights with the largest nDCG@10 on the judged queries, the first of equals."""
    known = {id_: candidates[id_] for id_ in qrels}
    return max(weights, key=lambda chosen: _mean(_ndcg(qrels, rerank(known, late, chosen))))


def late_scores(
    candidates: Mapping[str, Candidates],
    queries: TokenVectors,
    documents: TokenVectors,
) -> dict[str, FloatArray]:
    """Returns the MaxSim of each query's candidates; queries and documents are token vectors."""
    return {
        id_: max_sim(
            queries[id_].astype(np.float32),
            [documents[document].astype(np.float32) for document in found.ids],
        )
        for id_, found in candidates.items()
    }


def table(
    qrels: Qrels,
    tuning: Qrels,
    candidates: Mapping[str, Candidates],
    queries: TokenVectors,
    documents: TokenVectors,
    poolings: Sequence[int],
    codecs: Sequence[Codec],
) -> Iterator[Row]:
    """Yields the rows of the table: cosine, with BM25, and each pooling and codec.

    Args:
        qrels: Judgements that are measured.
        tuning: Judgements of other queries, on which the weights are chosen.
        candidates: Candidates of the queries of both.
        queries: Token vectors of each query, [tokens, k].
        documents: Token vectors of each document, [tokens, k].
        poolings: Tokens per stored vector.
        codecs: How vectors are stored.
    """
    if common := sorted(qrels.keys() & tuning.keys()):
        message = f"query '{common[0]}' is in the measured and in the tuning judgements: "
        message += "choose the weights on other queries"
        raise CareError(message, code="queries_overlap", id=common[0])
    nothing = {id_: np.zeros_like(found.cosines) for id_, found in candidates.items()}
    measured = {id_: candidates[id_] for id_ in qrels}
    dense = _ndcg(qrels, rerank(measured, nothing, Weights(0, 0)))

    def row(
        ranking: str,
        late: Mapping[str, FloatArray],
        chosen: Sequence[Weights],
        pooling: int = 1,
        codec: str = "",
        size: float = 0.0,
    ) -> Row:
        weights = choose_weights(tuning, candidates, late, chosen)
        values = _ndcg(qrels, rerank(measured, late, weights))
        gain = paired_difference(values, dense)
        return Row(ranking, pooling, codec, size, weights, _mean(values), gain)

    yield row("dense", nothing, [Weights(0, 0)])
    yield row("dense, BM25", nothing, [Weights(0, bm25) for bm25 in BM25])
    needed = dict.fromkeys(document for found in candidates.values() for document in found.ids)
    for pooling in poolings:
        pooled = {id_: pool_tokens(documents[id_].astype(np.float32), pooling) for id_ in needed}
        for codec in codecs:
            stored = {
                id_: decode_tokens(encode_tokens(vectors, codec), codec)
                for id_, vectors in pooled.items()
            }
            sizes = [len(x) * bytes_per_token(x.shape[1], codec) for x in pooled.values()]
            size = float(np.mean(sizes))
            late = late_scores(candidates, queries, stored)
            alone = [Weights(weight, 0) for weight in LATE]
            yield row("dense, late", late, alone, pooling, codec, size)
            fused = [Weights(*pair) for pair in product(LATE, BM25)]
            yield row("dense, late, BM25", late, fused, pooling, codec, size)


def _ndcg(qrels: Qrels, run: Run) -> list[float]:
    return list(score_queries(NDCG_10, qrels, run).values())


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
