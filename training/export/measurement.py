"""Comparison of an exported graph with its checkpoint, its thresholds, and the report."""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from core.choices import ExportPrecision
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


# Format and description of each value; values of single texts are the worst of all texts.
_VALUES = {
    "cosine": (".6f", "lowest cosine between the vectors of graph and float32 checkpoint"),
    "mean cosine": (".6f", "mean of these cosines"),
    "batch": (
        ".1e",
        "largest difference of a vector component between a text alone and in a padded batch",
    ),
    "norm": (".1e", "largest deviation of the L2 norm of the graph's vectors from 1"),
    "overlap@10": (
        ".3f",
        "mean share of the checkpoint's ten nearest documents that the graph also finds",
    ),
    "nDCG@10": (".4f", "mean over judged queries, with exact search"),
    "nDCG@10 loss": ("+.4f", "nDCG@10 of the checkpoint minus that of the graph"),
    "p50 ms": (".2f", "median latency of a single query, including tokenization"),
    "queries/s": (".0f", "queries per second in batches of 32"),
}
_AT_LEAST = ("cosine", "overlap@10")
_EXACT = {"cosine": 0.99999, "batch": 1e-4, "norm": 1e-4, "overlap@10": 0.99, "nDCG@10 loss": 0.002}
# Vector components are about 1/sqrt(d), 0.03 to 0.05. In a padded batch they may change by the
# rounding of half precision. With int8 they hardly change, because activation scales are fixed.
_HALF = {"cosine": 0.999, "batch": 5e-3, "norm": 2e-3, "overlap@10": 0.97, "nDCG@10 loss": 0.005}
_INT8 = {"cosine": 0.99, "batch": 1e-3, "norm": 1e-4, "overlap@10": 0.85, "nDCG@10 loss": 0.02}

# Acceptance thresholds by precision; a TensorRT engine computes in half precision.
THRESHOLDS: Mapping[str, Mapping[str, float]] = {
    "fp32": _EXACT,
    "fp16": _HALF,
    "int8": _INT8,
    "tensorrt": _EXACT,
    "tensorrt (engine)": _HALF,
}


@dataclass(frozen=True, slots=True)
class Row:
    """Result of exporting one precision."""

    precision: ExportPrecision
    provider: str  # execution provider of the measurements
    weights: str  # name of the file of weights
    weights_sha256: str = ""
    megabytes: float = 0.0  # size of the weights [10⁶ bytes]
    # Measured values by the names of `_VALUES`; empty if the graph does not run.
    values: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""  # why the graph does not run, or why no TensorRT engine was built; or ""

    @property
    def failures(self) -> list[str]:
        """Descriptions of the values that miss their thresholds; NaN always does."""
        if not self.values:
            return [f"does not run: {self.reason}"]
        on_engine = self.provider == "tensorrt"
        thresholds = THRESHOLDS["tensorrt (engine)" if on_engine else self.precision]
        return [
            f"{name} {value:.6g} (must be {_relation(name)} {thresholds[name]:g})"
            for name, value in self.values.items()
            if name in thresholds and not _passes(name, value, thresholds[name])
        ]


def _passes(name: str, value: float, threshold: float) -> bool:
    return value >= threshold if name in _AT_LEAST else value <= threshold


def _relation(name: str) -> str:
    return "≥" if name in _AT_LEAST else "≤"


def as_markdown(name: str, rows: Sequence[Row], lines: Sequence[str]) -> str:
    """Returns the report of a pair as Markdown, with lines on how values were measured."""
    found = []
    for row in rows:
        failed = f"**failed**: {'; '.join(row.failures)}; files deleted" if row.failures else ""
        size = f"{row.megabytes:.1f}" if row.megabytes else ""
        values = [
            f"{row.values[value]:{form}}" if value in row.values else ""
            for value, (form, _) in _VALUES.items()
        ]
        found.append([row.precision, row.provider, size, *values, failed or "passed"])
    thresholds = [
        [precision, *(f"{least:g}" for least in of_precision.values())]
        for precision, of_precision in THRESHOLDS.items()
    ]
    return "\n".join(
        [
            f"# Export of {name}",
            "",
            *_table(["precision", "provider", "MB", *_VALUES, "result"], found),
            "",
            *(f"- {value}: {meaning}" for value, (_, meaning) in _VALUES.items()),
            "",
            *_table(["thresholds", *(f"{v} {_relation(v)}" for v in _EXACT)], thresholds),
            "",
            *(f"- {line}" for line in lines),
            "",
        ]
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    ruler = ["---"] * len(head)
    return [f"| {' | '.join(cells)} |" for cells in (head, ruler, *rows)]
