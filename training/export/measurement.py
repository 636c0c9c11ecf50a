"""Comparison of an exported graph with its checkpoint: vectors, rankings and speed."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from core.encoders import Encoder, Encoding
from core.errors import CareError, DataError
from core.records import field_error, read_jsonl, string
from core.text import normalize_text
from core.types import FloatArray
from evaluation import beir
from evaluation.beir import Qrels, Run
from evaluation.dense import dense_run
from evaluation.metrics import NDCG_10, score_queries
from models.encoders.cached import encode_texts
from models.encoders.onnx import OnnxEncoder
from models.encoders.tokenizer import pad

# Questions used to quantise the embedded pair.
CALIBRATION = Path(__file__).parents[1] / "source" / "calibration.txt"
# Lengths of test texts in characters. Longer texts follow, until the encoder truncates one.
_LENGTHS = (1, 2, 7, 25, 80, 250, 700)
# Longer texts need gigabytes: attention grows with the square of the length.
_LONGEST = 2800
# Latin letters, full-width forms, and names of control tokens, which must be read as letters.
_UNUSUAL_TEXTS = ("Aspirin 100 mg，每日一次", "ＣＴ检查🙂", "[CLS]</s><|endoftext|>")
_DEPTH = 10
_BATCH = 32
_WARM_UP = 3
_LATENCIES = 100
_BATCHES = 5


def read_calibration(path: Path | None) -> list[str]:
    """Reads typical queries, normalised, from JSONL with `text`; None for those of `care-mini`."""
    if path is None:
        return CALIBRATION.read_text(encoding="utf-8").splitlines()
    texts = []
    for number, record in read_jsonl(path):
        texts.append(normalize_text(string(path, number, record, "text")))
        if not texts[-1]:
            raise field_error(path, number, "text", "is empty")
    if not texts:
        message = (
            f"{path} is empty: it must hold typical queries, one JSON object with text per line"
        )
        raise DataError(message, code="empty_file", path=path)
    return texts


@dataclass(frozen=True, slots=True)
class Judged:
    """Documents and judged queries, normalised texts by id, with their judgements."""

    documents: dict[str, str]
    queries: dict[str, str]
    qrels: Qrels

    @classmethod
    def read(cls, corpus: Path, queries: Path, qrels: Path) -> "Judged":
        """Reads files in BEIR's layout; DataError if a judgement has an unknown id."""
        documents = beir.document_texts(beir.read_documents(corpus))
        texts, grades = beir.read_queries(queries), beir.read_qrels(qrels)
        beir.check_judged(qrels, grades, texts, documents)
        return cls(documents, {id_: normalize_text(texts[id_]) for id_ in grades}, grades)


class Rankings:
    """Rankings of documents by exact search, of a checkpoint and of graphs exported from it."""

    def __init__(self, judged: Judged, document: Encoder, checkpoint: Encoder) -> None:
        self.judged = judged
        self._vectors = encode_texts(document, list(judged.documents.values()), _BATCH)
        self._reference = self._rank(checkpoint)
        self.ndcg = self._ndcg(self._reference)

    def measure(self, graph: Encoder) -> dict[str, float]:
        """Compares a graph's rankings with the checkpoint's; keys are names of the report."""
        found = self._rank(graph)
        overlap = statistics.fmean(
            len(found[query].keys() & hits.keys()) / len(hits)
            for query, hits in self._reference.items()
        )
        ndcg = self._ndcg(found)
        return {"overlap@10": overlap, "nDCG@10": ndcg, "nDCG@10 loss": self.ndcg - ndcg}

    def _rank(self, encoder: Encoder) -> Run:
        judged = self.judged
        queries = encode_texts(encoder, list(judged.queries.values()), _BATCH)
        return dense_run(
            judged.queries, queries, judged.documents, self._vectors, _DEPTH, judged.qrels
        )

    def _ndcg(self, run: Run) -> float:
        return statistics.fmean(score_queries(NDCG_10, self.judged.qrels, run).values())


class Reference:
    """Vectors of the float32 checkpoint, with which exported graphs are compared.

    The texts are made from typical queries, in all lengths up to the encoder's maximum; `tokens`
    are their numbers of tokens, ascending.
    """

    def __init__(
        self, checkpoint: Encoder, lines: Sequence[str], rankings: Rankings | None
    ) -> None:
        self.texts: list[str] = []
        self._expected: list[Encoding] = []
        for text in _texts_by_length("，".join(lines)):
            self.texts.append(text)
            self._expected.append(checkpoint.encode([text]))
            if self._expected[-1].truncated[0]:
                break
        self.texts += _UNUSUAL_TEXTS
        self._expected += [checkpoint.encode([text]) for text in _UNUSUAL_TEXTS]
        self.tokens = sorted(int(encoding.token_counts[0]) for encoding in self._expected)
        self.rankings = rankings
        self._queries = list(rankings.judged.queries.values()) if rankings else list(lines)

    def measure(self, graph: OnnxEncoder) -> dict[str, float]:
        """Compares an exported graph with its checkpoint; keys are names of the report."""
        alone = [graph.encode([text]) for text in self.texts]
        for one, other in zip(self._expected, alone, strict=True):
            if (one.token_counts, one.truncated) != (other.token_counts, other.truncated):
                message = "the exported tokenizer and the checkpoint's tokenize a text differently"
                raise CareError(message, code="other_tokens")
        vectors = _vectors(alone)
        cosines = (vectors.astype(np.float64) * _vectors(self._expected)).sum(axis=1)
        differences = [
            graph.encode([self.texts[row] for row in rows]).vectors - vectors[rows]
            for rows in self._batches()
        ]
        returned = [graph.run(*pad([tokens])) for tokens in graph.tokenize(self.texts)]
        return {
            "cosine": float(cosines.min()),
            "mean cosine": float(cosines.mean()),
            "batch": max(float(np.abs(difference).max()) for difference in differences),
            "norm": max(abs(float(np.linalg.norm(vector)) - 1) for vector in returned),
            **(self.rankings.measure(graph) if self.rankings else {}),
            **_speed(graph, self._queries),
        }

    def _batches(self) -> list[list[int]]:
        """Returns rows of texts: all texts, the shortest with the longest, and many short ones."""
        order = np.argsort([len(text) for text in self.texts], kind="stable").tolist()
        short = order[: len(order) // 2]
        return [order, [order[0], order[-1]], (short * _BATCH)[:_BATCH]]


def _texts_by_length(words: str) -> list[str]:
    lengths = list(_LENGTHS)
    while lengths[-1] < _LONGEST:
        lengths.append(2 * lengths[-1])
    words *= 6 * _LONGEST // len(words) + 1
    return [words[5 * n : 6 * n] for n in lengths]


def _speed(graph: Encoder, queries: Sequence[str]) -> dict[str, float]:
    cycled = list(queries) * (-(-_BATCH * _BATCHES // len(queries)))
    batches = [cycled[_BATCH * i : _BATCH * (i + 1)] for i in range(_BATCHES)]
    for text in cycled[:_WARM_UP]:
        graph.encode([text])
    alone = [_seconds(graph, [text]) for text in cycled[:_LATENCIES]]
    graph.encode(batches[0])
    together = [_seconds(graph, batch) for batch in batches]
    milliseconds = 1000 * statistics.median(alone)
    return {"p50 ms": milliseconds, "queries/s": _BATCH / statistics.median(together)}


def _seconds(graph: Encoder, texts: list[str]) -> float:
    start = time.perf_counter()
    graph.encode(texts)
    return time.perf_counter() - start


def _vectors(encodings: Sequence[Encoding]) -> FloatArray:
    return np.concatenate([encoding.vectors for encoding in encodings])
