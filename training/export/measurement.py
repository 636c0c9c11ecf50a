"""How near an exported graph is to its checkpoint, what that does to a ranking, how fast it is."""

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

# The questions that the embedded pair is quantised with.
CALIBRATION = Path(__file__).parents[1] / "source" / "calibration.txt"
# Texts of these numbers of characters, and on by doubling until the encoder truncates one.
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


def read_calibration(path: Path | None) -> list[str]:
    """Returns typical queries under the text rules, of JSONL or else those of the embedded pair."""
    if path is None:
        return CALIBRATION.read_text(encoding="utf-8").splitlines()
    texts = []
    for number, record in read_jsonl(path):
        texts.append(normalize_text(string(path, number, record, "text")))
        if not texts[-1]:
            raise field_error(path, number, "text", "is empty")
    if not texts:
        raise DataError(f"{path} is empty", code="empty_file", path=path)
    return texts


@dataclass(frozen=True, slots=True)
class Judged:
    """What rankings are measured on: texts under the text rules, by id, of judged queries alone."""

    documents: dict[str, str]
    queries: dict[str, str]
    qrels: Qrels

    @classmethod
    def read(cls, corpus: Path, queries: Path, qrels: Path) -> "Judged":
        """Reads files in BEIR's layout, in which all judged queries and documents exist."""
        documents = beir.document_texts(beir.read_documents(corpus))
        texts, grades = beir.read_queries(queries), beir.read_qrels(qrels)
        beir.check_judged(qrels, grades, texts, documents)
        return cls(documents, {id_: normalize_text(texts[id_]) for id_ in grades}, grades)


class Rankings:
    """How queries rank documents by exact search over the document side's vectors.

    Attributes:
        judged: Queries, documents and judgements.
        ndcg: Mean nDCG@10 of the checkpoint, the query side that is exported.
    """

    def __init__(self, judged: Judged, document: Encoder, checkpoint: Encoder) -> None:
        self.judged = judged
        self._vectors = encode_texts(document, list(judged.documents.values()), _BATCH)
        self._reference = self._rank(checkpoint)
        self.ndcg = self._ndcg(self._reference)

    def measure(self, graph: Encoder) -> dict[str, float]:
        """Returns the values of a graph's rankings, by the report's names."""
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
        return dense_run(judged.queries, queries, judged.documents, self._vectors, _DEPTH)

    def _ndcg(self, run: Run) -> float:
        return statistics.fmean(score_queries(NDCG_10, self.judged.qrels, run).values())


class Reference:
    """What graphs are compared with: texts of all lengths that the encoder reads.

    The encoder is the float32 checkpoint; texts are made from typical queries.

    Attributes:
        tokens: Their numbers of tokens, rising.
    """

    def __init__(
        self, checkpoint: Encoder, lines: Sequence[str], rankings: Rankings | None
    ) -> None:
        self.texts: list[str] = []
        self._expected: list[Encoding] = []
        for text in _grid("，".join(lines)):
            self.texts.append(text)
            self._expected.append(checkpoint.encode([text]))
            if self._expected[-1].truncated[0]:
                break
        self.texts += _ODD
        self._expected += [checkpoint.encode([text]) for text in _ODD]
        self.tokens = sorted(int(encoding.token_counts[0]) for encoding in self._expected)
        self.rankings = rankings
        self._queries = list(rankings.judged.queries.values()) if rankings else list(lines)

    def measure(self, graph: OnnxEncoder) -> dict[str, float]:
        """Compares an exported graph with its checkpoint; returns values by the report's names.

        Raises:
            CareError: If the two read other tokens, or a vector is no vector.
        """
        alone = [graph.encode([text]) for text in self.texts]
        for one, other in zip(self._expected, alone, strict=True):
            if (one.token_counts, one.truncated) != (other.token_counts, other.truncated):
                message = "the exported tokenizer makes other tokens of texts than its checkpoint"
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
        """Returns rows of texts: all, the shortest beside the longest, many short ones."""
        order = np.argsort([len(text) for text in self.texts], kind="stable").tolist()
        short = order[: len(order) // 2]
        return [order, [order[0], order[-1]], (short * _BATCH)[:_BATCH]]


def _grid(words: str) -> list[str]:
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
