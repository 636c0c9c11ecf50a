"""Small data of the tasks, and an encoder that needs no model."""

from pathlib import Path

import numpy as np

from core.encoders import EncoderSpec, Encoding
from tests.conftest import write_jsonl

TOPICS = ["高血压少盐饮食", "骨折固定患肢", "儿童发热多饮水", "糖尿病监测血糖", "哮喘吸入药物"]


def write_data(root: Path) -> Path:
    """A folder of the five tasks of the paper."""
    passages = [f"{topic}，{number}" for topic in TOPICS for number in range(4)]
    write_jsonl(
        root / "retrieval" / "corpus.jsonl",
        [{"_id": f"d{i}", "text": text} for i, text in enumerate(passages)],
    )
    write_jsonl(
        root / "retrieval" / "queries.jsonl",
        [{"_id": f"q{i}", "text": topic[:4]} for i, topic in enumerate(TOPICS)],
    )
    qrels = "".join(f"q{i}\td{4 * i + n}\t{1 + n % 2}\n" for i in range(5) for n in range(3))
    (root / "retrieval" / "qrels").mkdir()
    (root / "retrieval" / "qrels" / "test.tsv").write_text(qrels, "utf-8")
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
