"""Which examples form which batch, and the tensors of a batch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from core.encoders import Role
from core.types import FloatArray, RowArray
from training.data import Example, Text
from training.encoder import Tokens
from training.vectors import TeacherVectors

# Texts are sorted by length among this many batches: near in length, and drawn at random.
_GROUP = 32
Item = tuple[int, int]
Batch = dict[str, Tensor]


class Plan(Dataset[Any]):
    """The batches of all epochs, each a list of (epoch, example); a function of its arguments.

    A resumed run makes the same plan and skips what it has seen. What is left over when an
    epoch's examples are cut into batches is left out of that epoch. With `lengths`, the tokens of
    each example, batches hold texts of similar length. For a data loader it is the sampler of
    batches and the data: an item is itself.
    """

    drop_last = True

    def __init__(
        self, count: int, epochs: int, batch_size: int, seed: int, lengths: RowArray | None = None
    ) -> None:
        self.batch_size = min(batch_size, count)
        self._count, self._epochs, self._seed = count, epochs, seed
        self._lengths = lengths

    def __len__(self) -> int:
        return self._epochs * (self._count // self.batch_size)

    def __getitem__(self, item: Any) -> Any:
        return item

    def __iter__(self) -> Iterator[list[Item]]:
        for epoch in range(self._epochs):
            generator = np.random.default_rng([self._seed, epoch])
            order = generator.permutation(self._count)
            order = order[: len(order) // self.batch_size * self.batch_size]
            if self._lengths is not None:
                size = _GROUP * self.batch_size
                groups = (order[start : start + size] for start in range(0, len(order), size))
                order = np.concatenate(
                    [group[np.argsort(self._lengths[group], kind="stable")] for group in groups]
                )
            batches = order.reshape(-1, self.batch_size)
            for rows in batches[generator.permutation(len(batches))]:
                yield [(epoch, int(row)) for row in rows]


@dataclass(frozen=True, slots=True)
class Corpus:
    """Examples by the rows of their texts: each text is held and tokenized once."""

    queries: list[str]
    documents: list[str]
    positives: list[list[int]]
    negatives: list[list[int]]
    pairs: list[Item]

    @classmethod
    def of(cls, examples: Sequence[Example]) -> "Corpus":
        """Returns examples with a pair of query and positive for each of their positives."""
        texts = (text for example in examples for text in (*example.positives, *example.negatives))
        documents = list(dict.fromkeys(texts))
        row_of = {text: row for row, text in enumerate(documents)}
        positives = [[row_of[text] for text in example.positives] for example in examples]
        negatives = [[row_of[text] for text in example.negatives] for example in examples]
        pairs = [(query, row) for query, rows in enumerate(positives) for row in rows]
        queries = [example.query for example in examples]
        return cls(queries, documents, positives, negatives, pairs)


@dataclass
class PairCollator:
    """Tensors of a batch of queries, their positives and hard negatives.

    A document that several queries name is in the batch once. `positives` lists all positives
    of each query, padded with −1, so that none of them is taken for a negative.
    """

    corpus: Corpus
    texts: Mapping[Role, Tokens | FloatArray]  # vectors of those whose encoder is frozen
    negatives: int  # hard ones of each query, drawn by seed, epoch and query
    seed: int
    teacher: TeacherVectors | None = None
    all_documents: bool = False  # whether every document of the corpus is in each batch

    def __post_init__(self) -> None:
        if self.teacher is not None:
            queries, documents = self.corpus.queries, self.corpus.documents
            self._teacher_queries = self.teacher.rows([Text("query", q) for q in queries])
            self._teacher_documents = self.teacher.rows([Text("document", d) for d in documents])

    def __call__(self, items: Sequence[Item]) -> Batch:
        """Returns the batch of these (epoch, pair)."""
        corpus = self.corpus
        pairs = [corpus.pairs[pair] for _, pair in items]
        queries, targets = [query for query, _ in pairs], [document for _, document in pairs]
        named = dict.fromkeys(targets)
        for (epoch, _), query in zip(items, queries, strict=True):
            named |= dict.fromkeys(self._drawn(epoch, query))
        if self.all_documents:
            named |= dict.fromkeys(range(len(corpus.documents)))
        documents = list(named)
        column_of = {document: column for column, document in enumerate(documents)}
        columns = zip_longest(*(corpus.positives[query] for query in queries), fillvalue=-1)
        batch = {
            **_inputs("query", self.texts["query"], queries),
            **_inputs("document", self.texts["document"], documents),
            "documents": torch.tensor(documents),
            "positives": torch.tensor(list(columns)).T,
            "targets": torch.tensor([column_of[document] for document in targets]),
        }
        if self.teacher is not None:
            rows = self._teacher_queries[queries], self._teacher_documents[documents]
            batch["teacher_queries"] = torch.from_numpy(self.teacher.take(rows[0]))
            batch["teacher_documents"] = torch.from_numpy(self.teacher.take(rows[1]))
        return batch

    def _drawn(self, epoch: int, query: int) -> list[int]:
        negatives = self.corpus.negatives[query]
        if len(negatives) <= self.negatives:
            return negatives
        generator = np.random.default_rng([self.seed, epoch, query])
        drawn = generator.choice(len(negatives), self.negatives, replace=False)
        return [negatives[i] for i in drawn]


def align_batch(
    tokens: Tokens, teacher: TeacherVectors, rows: RowArray, items: Sequence[Item]
) -> Batch:
    """Returns the batch of these (epoch, text), of which the teacher's vectors are in `rows`."""
    texts = [text for _, text in items]
    vectors = torch.from_numpy(teacher.take(rows[texts]))
    return _inputs("query", tokens, texts) | {"teacher": vectors}


def _inputs(role: Role, texts: Tokens | FloatArray, rows: list[int]) -> Batch:
    if isinstance(texts, Tokens):
        ids, mask = texts.padded(rows)
        return {f"{role}_ids": ids, f"{role}_mask": mask}
    return {f"{role}_vectors": torch.from_numpy(texts[rows])}
