"""How near an exported graph is to its checkpoint, what that does to a ranking, how fast it is."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from core.errors import CareError
from core.types import Encoder, Encoding, FloatArray
from models.encoders.onnx import OnnxEncoder
from models.encoders.providers import ON_CPU, ProviderOptions, execution_providers
from models.evaluation.beir import Qrels, Run
from models.evaluation.scores import NDCG_10, score_queries
from models.export.onnx import run

# Texts of these numbers of characters, and on by doubling until one is cut by the encoder.
_LENGTHS = (1, 2, 7, 25, 80, 250, 700)
# A longer one costs gigabytes: attention grows with the square of the length.
_LONGEST = 2800
# Words in Latin letters, full-width forms, and control tokens that are meant as letters.
_ODD = ("Aspirin 100 mg，每日一次", "ＣＴ检查🙂", "[CLS]</s><|endoftext|>")
_DEPTH = 10
_BATCH = 32
_WARM_UP = 3
_LATENCIES = 100
_BATCHES = 5


@dataclass(frozen=True, slots=True)
class Judged:
    """What rankings are measured on; texts are under the text rules.

    Attributes:
        documents: Text by id.
        queries: Text by id, of judged queries.
        qrels: Grades by document id, by query id.
    """

    documents: dict[str, str]
    queries: dict[str, str]
    qrels: Qrels


@dataclass(frozen=True, slots=True)
class Rankings:
    """How queries rank documents by exact search over the document side's vectors.

    Attributes:
        judged: Queries, documents and judgements.
        documents: float32 [documents, dimension].
        reference: Run of the checkpoint, ten documents for each query.
        ndcg: Its mean nDCG@10.
    """

    judged: Judged
    documents: FloatArray
    reference: Run
    ndcg: float

    @classmethod
    def of(cls, judged: Judged, document: Encoder, checkpoint: Encoder) -> "Rankings":
        """Encodes documents and queries, and ranks by the checkpoint of the query side."""
        documents = _encode(document, list(judged.documents.values()))
        queries = _encode(checkpoint, list(judged.queries.values()))
        reference = _rank(judged, documents, queries)
        return cls(judged, documents, reference, _ndcg(judged, reference))


@dataclass(frozen=True, slots=True)
class Reference:
    """What a graph is compared with.

    Attributes:
        texts: Texts of all lengths that the encoder reads.
        expected: What the checkpoint makes of each by itself, in float32.
        queries: Texts whose encoding is timed.
        rankings: What rankings are compared with, or None.
    """

    texts: Sequence[str]
    expected: Sequence[Encoding]
    queries: Sequence[str]
    rankings: Rankings | None

    @classmethod
    def of(
        cls, checkpoint: Encoder, lines: Sequence[str], rankings: Rankings | None
    ) -> "Reference":
        """Encodes texts of all lengths.

        Args:
            checkpoint: The encoder that is exported.
            lines: Texts that longer and shorter ones are made from.
            rankings: What rankings are compared with, or None.
        """
        texts, expected = [], []
        for text in _grid("，".join(lines)):
            texts.append(text)
            expected.append(checkpoint.encode([text]))
            if expected[-1].truncated[0]:
                break
        texts += _ODD
        expected += [checkpoint.encode([text]) for text in _ODD]
        queries = list(rankings.judged.queries.values()) if rankings else list(lines)
        return cls(texts, expected, queries, rankings)

    @property
    def tokens(self) -> list[int]:
        """Numbers of tokens of the texts, rising."""
        return sorted(int(encoding.token_counts[0]) for encoding in self.expected)


def _grid(words: str) -> list[str]:
    lengths = list(_LENGTHS)
    while lengths[-1] < _LONGEST:
        lengths.append(2 * lengths[-1])
    words *= 6 * _LONGEST // len(words) + 1
    return [words[5 * n : 6 * n] for n in lengths]


@dataclass(frozen=True, slots=True)
class Retrieval:
    """What a graph's vectors do to rankings.

    Attributes:
        overlap: Mean part of the checkpoint's ten nearest documents that the graph finds.
        ndcg: Mean nDCG@10.
        reference_ndcg: The same of the checkpoint.
    """

    overlap: float
    ndcg: float
    reference_ndcg: float


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast queries are encoded, tokenizing included.

    Attributes:
        p50_ms: Median time of one query by itself [ms].
        batch_rate: Queries a second in batches of 32.
    """

    p50_ms: float
    batch_rate: float


@dataclass(frozen=True, slots=True)
class Measured:
    """Figures of one graph; those of single texts are the worst of all texts.

    Attributes:
        cosine: Lowest cosine of the graph's vector to the checkpoint's.
        mean_cosine: Its mean.
        batch: Largest difference of a component between a text alone and in a padded batch.
        norm: Largest distance of the L2 norm from 1 of what the graph returns.
        retrieval: Rankings, or None if no documents were given.
        speed: Times.
    """

    cosine: float
    mean_cosine: float
    batch: float
    norm: float
    retrieval: Retrieval | None
    speed: Speed


def measure(
    graph: OnnxEncoder, weights: Path, reference: Reference, provider: ProviderOptions = ON_CPU
) -> Measured:
    """Compares an exported graph with its checkpoint.

    Args:
        graph: What reads the exported files.
        weights: The file of the graph.
        reference: What it is compared with.
        provider: Where the norm of what the graph itself returns is measured.

    Raises:
        CareError: If the two read other tokens, or a vector is no vector.
    """
    texts = list(reference.texts)
    alone = [graph.encode([text]) for text in texts]
    for one, other in zip(reference.expected, alone, strict=True):
        if (one.token_counts, one.truncated) != (other.token_counts, other.truncated):
            raise CareError(
                "the exported tokenizer cuts texts into other tokens than its checkpoint"
            )
    vectors = _vectors(alone)
    cosines = (vectors.astype(np.float64) * _vectors(reference.expected)).sum(axis=1)
    return Measured(
        cosine=float(cosines.min()),
        mean_cosine=float(cosines.mean()),
        batch=max(
            float(np.abs(graph.encode([texts[row] for row in rows]).vectors - vectors[rows]).max())
            for rows in _batches(reference)
        ),
        norm=max(abs(norm - 1) for norm in _norms(weights, graph, texts, provider)),
        retrieval=_retrieval(graph, reference.rankings) if reference.rankings else None,
        speed=_speed(graph, reference.queries),
    )


def _batches(reference: Reference) -> list[list[int]]:
    """Returns rows of texts: all, the shortest beside the longest, many short ones."""
    order = np.argsort([len(text) for text in reference.texts], kind="stable").tolist()
    short = order[: len(order) // 2]
    return [order, [order[0], order[-1]], (short * _BATCH)[:_BATCH]]


def _norms(
    weights: Path, graph: OnnxEncoder, texts: list[str], provider: ProviderOptions
) -> list[float]:
    rows = [np.array([tokens.ids], dtype=np.int64) for tokens in graph.tokenize(texts)]
    found = run(weights, rows, execution_providers(provider, graph.spec))
    return [float(np.linalg.norm(vectors)) for vectors in found]


def _retrieval(graph: Encoder, rankings: Rankings) -> Retrieval:
    queries = _encode(graph, list(rankings.judged.queries.values()))
    found = _rank(rankings.judged, rankings.documents, queries)
    overlaps = [
        len(found[query].keys() & hits.keys()) / len(hits)
        for query, hits in rankings.reference.items()
    ]
    return Retrieval(statistics.fmean(overlaps), _ndcg(rankings.judged, found), rankings.ndcg)


def _rank(judged: Judged, documents: FloatArray, queries: FloatArray) -> Run:
    ids = list(judged.documents)
    scores = queries @ documents.T
    nearest = np.argsort(-scores, axis=1, kind="stable")[:, :_DEPTH]
    return {
        query: {ids[row]: float(scores[i, row]) for row in nearest[i]}
        for i, query in enumerate(judged.queries)
    }


def _ndcg(judged: Judged, run: Run) -> float:
    return statistics.fmean(score_queries(NDCG_10, judged.qrels, run).values())


def _encode(encoder: Encoder, texts: Sequence[str]) -> FloatArray:
    """Encodes texts in batches of similar length; float32 [n, dimension]."""
    order = sorted(range(len(texts)), key=lambda row: len(texts[row]))
    vectors = np.empty((len(texts), encoder.spec.dimension), dtype=np.float32)
    for start in range(0, len(order), _BATCH):
        rows = order[start : start + _BATCH]
        vectors[rows] = encoder.encode([texts[row] for row in rows]).vectors
    return vectors


def _speed(graph: Encoder, queries: Sequence[str]) -> Speed:
    cycled = list(queries) * (-(-_BATCH * _BATCHES // len(queries)))
    batches = [cycled[_BATCH * i : _BATCH * (i + 1)] for i in range(_BATCHES)]
    for text in cycled[:_WARM_UP]:
        graph.encode([text])
    alone = [_seconds(graph, [text]) for text in cycled[:_LATENCIES]]
    graph.encode(batches[0])
    together = [_seconds(graph, batch) for batch in batches]
    return Speed(1000 * statistics.median(alone), _BATCH / statistics.median(together))


def _seconds(graph: Encoder, texts: list[str]) -> float:
    start = time.perf_counter()
    graph.encode(texts)
    return time.perf_counter() - start


def _vectors(encodings: Sequence[Encoding]) -> FloatArray:
    return np.concatenate([encoding.vectors for encoding in encodings])
