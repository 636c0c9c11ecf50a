"""Small data of the tasks, and an encoder that needs no model."""

from pathlib import Path

import numpy as np

from core.encoders import EncoderSpec, Encoding
from core.types import Document
from evaluation.beir import write_beir
from tests.conftest import write_jsonl

TOPICS = ["高血压少盐饮食", "骨折固定患肢", "儿童发热多饮水", "糖尿病监测血糖", "哮喘吸入药物"]


def write_data(root: Path) -> Path:
    """A folder of the five tasks of the paper."""
    passages = [f"{topic}，{number}" for topic in TOPICS for number in range(4)]
    documents = [Document(f"d{i}", text) for i, text in enumerate(passages)]
    queries = {f"q{i}": topic[:4] for i, topic in enumerate(TOPICS)}
    qrels = {f"q{i}": {f"d{4 * i + n}": 1 + n % 2 for n in range(3)} for i in range(5)}
    write_beir(root / "retrieval", "test", documents, queries, qrels)
    rerank = [
        {"query": t[:3], "positives": [t, passages[4 * i + 1]], "negatives": passages[:12:4]}
        for i, t in enumerate(TOPICS)
    ]
    for name in ("cmedqa-v1.jsonl", "cmedqa-v2.jsonl", "rerank.jsonl"):
        write_jsonl(root / name, rerank)
    write_jsonl(
        root / "sts.jsonl",
        [{"text1": a, "text2": b[:5], "label": int(a == b)} for a in TOPICS for b in TOPICS],
    )
    return root


class CharacterEncoder:
    """Counts hashed characters; records the texts that it encodes."""

    def __init__(self, spec: EncoderSpec) -> None:
        self.spec = spec
        self.texts: list[str] = []

    def encode(self, texts: list[str]) -> Encoding:
        self.texts += texts
        vectors = np.full((len(texts), self.spec.dimension), 1e-3, dtype=np.float32)
        for row, text in enumerate(texts):
            for character in self.spec.prompt + text:
                vectors[row, ord(character) % self.spec.dimension] += 1
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        counts = np.array([len(text) for text in texts], dtype=np.int32)
        return Encoding(vectors, counts, np.zeros(len(texts), dtype=np.bool_))


class Encoders:
    def __init__(self) -> None:
        self.made: list[CharacterEncoder] = []

    def load(self, spec: EncoderSpec, folder: Path) -> CharacterEncoder:
        self.made.append(CharacterEncoder(spec))
        return self.made[-1]
