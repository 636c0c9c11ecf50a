"""Evidence: the sentence of a hit that answers the query, and whether that is certain.

A linear model scores the sentences of a text: by the terms that they share with the query, by their
place and length, and by their characters and pairs of characters, alone and with each kind of
question that the query has. `care evidence` fits it on marked sentences. Of a text of another kind
or language the sentence that shares most with the query is chosen, by the idf of its terms.
"""

import math
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from core.analysis import terms
from core.files import atomic, writing_in
from core.sentences import Span, sentences
from core.types import Evidence

# Fitted by `care evidence --out`; data/medical-qa-zh-evidence/README.md has the command.
WEIGHTS = Path(__file__).with_name("evidence.npz")
BUCKETS = 1 << 18
# A sentence of a text that the model does not know is certain if it has so much more of the query
# than any other: a share of the query's weight. Chosen on data/sample/evidence.jsonl.
_CLEAR = 0.4
_HASH, _PAIR, _KIND = (
    np.uint64(odd) for odd in (0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93, 0xC2B2AE3D27D4EB4F)
)
_SHIFT = np.uint64(64 - BUCKETS.bit_length() + 1)
# Kinds of question.
_KINDS = [
    re.compile(kind)
    for kind in (
        "药",
        "怎么办|咋办|咋样?治|怎样?么?治|如何治|治疗|医治|救治|诊治|处理|缓解|调理|调养|消除|解决|方法|办法|控制",
        r"吗|是否|可否|能否|([能会是要有可需算])(不|没有?)\1",
        "原因|为什么|为啥|引起|回事|导致|才会|诱",
        "症状|表现|反应|前兆|不适|感觉|特征",
        "饮食|吃|喝|忌|食物|水果|菜|营养",
        "传染|遗传|感染|传播",
        "钱|费用|价格",
        "多久|时间|几|时候|多少|多长",
        "正常|标准|报告|化验|怎么?样?看|指标|意思|说明",
        "是什么|什么病|区别|分类|种类|有几",
        "预防|注意|留意|避免|护理|保健",
        "严重|危害|后果|影响|多长|治好|治愈|根治|痊愈|寿命",
        "孕|生育|孩子|宝宝|婴|儿童|结婚",
        "医院|哪家|专家|哪里|哪儿",
        "检查|诊断|检测|确诊|体检",
        "疫苗|针",
        "可以|能|应该|适合|好",
    )
]


class Asked(NamedTuple):
    """What the sentences of hits are compared with."""

    weights: Mapping[str, float]  # of the query's terms
    kinds: NDArray[np.uint64]  # the hash of each kind of question that the query has; 0 for any


class Sentences(NamedTuple):
    """The sentences of a text beside a query."""

    spans: list[Span]
    # [s, 5]: the share of the query's weight that each has, the same beside the highest share,
    # whether it is the first, its place, and the logarithm of its length
    measures: NDArray[np.float64]
    # [characters of the text, 2, kinds]: buckets of each character, and of it with the next one
    buckets: NDArray[np.int64]
    scale: NDArray[np.float64]  # [s]: of the sum of the weights of all n-grams of a sentence


class Model(NamedTuple):
    """Weights of the features of sentences, and limits."""

    measures: NDArray[np.float64]  # [5]
    grams: NDArray[np.float32]  # [BUCKETS], of a float16 each
    # Least share of the pairs of characters of a text that have a weight: it knows such texts.
    known: float
    certain: float  # least probability of a sentence that is certain

    @classmethod
    def read(cls, path: Path) -> "Model":
        """Reads the file of a model, whose checksum is that of a zip file."""
        with np.load(path, allow_pickle=False) as arrays:
            grams = arrays["grams"].astype(np.float32)
            return cls(arrays["measures"], grams, *arrays["limits"].tolist())

    def write(self, path: Path) -> None:
        """Writes the model; equal models make equal files."""
        limits = np.array([self.known, self.certain])
        grams = self.grams.astype(np.float16)
        with writing_in(path.parent), atomic(path) as new, new.open("wb") as file:
            np.savez_compressed(file, measures=self.measures, grams=grams, limits=limits)

    def choose(self, found: Sentences) -> tuple[int, float]:
        """Returns the best of one or more sentences, and the probability that it is."""
        weights = self.grams[found.buckets]
        if np.count_nonzero(weights[:, 1, 0]) < self.known * len(weights):
            shares = found.measures[:, 0].tolist()
            most = max(shares)
            best = shares.index(most)
            others = max(shares[:best] + shares[best + 1 :], default=0.0)
            return best, float(most - others >= _CLEAR)
        sums = np.zeros(weights.size + 1)
        weights.cumsum(dtype=np.float64, out=sums[1:])
        ends = sums[np.array(found.spans) * weights[0].size]
        scores = found.measures @ self.measures + (ends[:, 1] - ends[:, 0]) * found.scale
        best = int(scores.argmax())
        return best, float(1 / np.exp(scores - scores[best]).sum())


@cache
def shipped() -> Model:
    """Returns the model that is part of this release."""
    return Model.read(WEIGHTS)


def asked(query: str, weight: Callable[[str], float] | None) -> Asked:
    """Returns what sentences are compared with; the weight of a term is its idf, 1 for None."""
    weights = {term: weight(term) if weight else 1.0 for term in dict.fromkeys(terms(query))}
    kinds = [number for number, kind in enumerate(_KINDS, 1) if kind.search(query)]
    return Asked(weights, np.array([0, *(kinds or [len(_KINDS) + 1])], np.uint64) * _KIND)


def compared(question: Asked, text: str) -> Sentences:
    """Returns the sentences of a text beside a question."""
    spans = sentences(text)
    total = sum(question.weights.values()) or 1.0
    shares = []
    for start, end in spans:
        found = set(terms(text[start:end]))
        shares.append(sum(w for term, w in question.weights.items() if term in found) / total)
    most, count = max(shares, default=0) or 1.0, len(spans)
    measures = [
        (share, share / most, at == 0, at / count, math.log(end - start + 1))
        for at, (share, (start, end)) in enumerate(zip(shares, spans, strict=True))
    ]
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32).astype(np.uint64)
    grams = np.empty((len(codes), 2, 1), np.uint64)
    grams[:, 0, 0], grams[:, 1, 0] = codes, codes * _PAIR
    grams[:-1, 1, 0] += codes[1:]
    buckets = (grams + question.kinds) * _HASH >> _SHIFT
    scale = np.array([((end - start) * len(question.kinds)) ** -0.5 for start, end in spans])
    return Sentences(spans, np.array(measures), buckets.view(np.int64), scale)


def best_sentence(question: Asked, text: str) -> Evidence | None:
    """Returns the sentence of a hit's text that answers best, by the model of this release.

    Returns the first one of equal sentences, and None if the text has no letter or digit.
    """
    found = compared(question, text)
    if not found.spans:
        return None
    best, probability = shipped().choose(found)
    start, end = found.spans[best]
    return Evidence(start, end, text[start:end], probability >= shipped().certain)
