"""Data of stages on disk. The examples in memory are the reference."""

import random
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from core.records import Triple
from tests.conftest import write_jsonl
from tests.training.encoders import checkpoint_of
from training.batches import BatchPlan
from training.corpus import Corpus, Text, key_of
from training.data import stream_texts
from training.encoder import tokenize
from training.schema import DataEntry
from training.stages.base import Context
from training.stages.prepared import prepare_examples, prepare_texts

pytestmark = pytest.mark.train


def merged(examples: list[Triple]) -> list[Triple]:
    found: dict[str, tuple[list[str], list[str]]] = {}
    for example in examples:
        positives, negatives = found.setdefault(example.query, ([], []))
        positives.extend(example.positives)
        negatives.extend(example.negatives)
    return [
        Triple(query, tuple(dict.fromkeys(p)), tuple(dict.fromkeys(t for t in n if t not in p)))
        for query, (p, n) in found.items()
    ]


def test_examples_on_disk_are_merged_and_numbered_as_in_memory() -> None:
    draw = random.Random(0)

    def documents(least: int) -> tuple[str, ...]:
        return tuple(f"文{draw.randrange(9)}" for _ in range(draw.randrange(least, 4)))

    for _ in range(50):
        examples = [
            Triple(f"问{draw.randrange(6)}", documents(1), documents(0))
            for _ in range(draw.randrange(1, 12))
        ]
        corpus, expected = Corpus.of(examples), merged(examples)
        assert list(corpus.examples()) == expected
        texts = [text for e in expected for text in (*e.positives, *e.negatives)]
        assert list(corpus.documents) == list(dict.fromkeys(texts))
        keys = [key_of(Text("document", text).id) for text in corpus.documents]
        assert corpus.document_keys.tolist() == keys
        pairs = [(row, text) for row, e in enumerate(expected) for text in e.positives]
        rows = corpus.positives.row_of(np.arange(len(pairs)))
        found = [corpus.documents[row] for row in corpus.positives.values]
        assert list(zip(rows.tolist(), found, strict=True)) == pairs


def test_texts_and_tokens_on_disk_equal_those_in_memory(bert: Path, tmp_path: Path) -> None:
    records = [{"a": f"问{i % 40}", "b": f"文{i % 70}。头痛"} for i in range(100)]
    path = write_jsonl(tmp_path / "x.jsonl", records)
    entries = [
        DataEntry(texts=str(path), fields=["a", "b"]),
        DataEntry(texts=str(path), fields=["a"], role="document"),
    ]
    data = prepare_texts(Context(0, tmp_path / "out"), entries)
    read = list(dict.fromkeys(stream_texts(entries, frozenset(), {}, Counter())))
    assert data.texts[:] == read
    assert [data.texts[row] for row in range(len(read))] == read
    checkpoint = checkpoint_of(bert, tmp_path)
    tokens = data.tokens("texts", data.texts.texts, checkpoint, "查")
    expected = tokenize(checkpoint, "查", [text.text for text in read])
    assert np.array_equal(tokens.values, expected.values)
    assert np.array_equal(tokens.offsets, expected.offsets)
    # A later stage with the same data reads neither the data nor the texts again.
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    again = prepare_texts(Context(0, tmp_path / "out"), entries)
    again.tokens("texts", data.texts.texts, checkpoint, "查")
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    # Tokens depend on the prompt.
    other = again.tokens("texts", data.texts.texts, checkpoint, "")
    assert len(other.values) < len(tokens.values)


def test_data_and_tokens_are_never_all_in_memory(bert: Path, tmp_path: Path) -> None:
    records = [{"title": f"问{i}", "text": f"文{i}" + "头痛" * 500} for i in range(3_000)]
    path = write_jsonl(tmp_path / "x.jsonl", records)
    context, checkpoint = Context(0, tmp_path / "out"), checkpoint_of(bert, tmp_path)
    tracemalloc.start()
    data = prepare_texts(context, [DataEntry(texts=str(path), fields=["title", "text"])])
    corpus = prepare_examples(context, [DataEntry(pairs=str(path))]).corpus
    tokens = data.tokens("texts", data.texts.texts, checkpoint, "")
    batch = next(iter(BatchPlan(len(tokens), 1, 4, 0, tokens.lengths)))
    tokens.padded([row for _, row in batch])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (len(data.texts), len(corpus.queries)) == (6_000, 3_000)
    # A block of 1,024 texts is the largest part in memory.
    assert peak < path.stat().st_size / 2
