"""Batch sampling, and collation of examples into tensors."""

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

# Batches per group: texts are shuffled into groups and sorted by length within a group.
_GROUP = 32
Item = tuple[int, int]
Batch = dict[str, Tensor]


class BatchPlan(Dataset[Any]):
    """Batch sampler of all epochs; each batch is a list of (epoch, example).

    The batches depend on the arguments alone, so a resumed run skips the batches that it has
    already seen. The incomplete last batch of an epoch is dropped. With `lengths`, int64
    [count], the tokens of each example, a batch holds examples of similar length. A data loader
    uses the same object as dataset: its items are the (epoch, example) pairs themselves.
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
    """Examples as rows of two lists of distinct texts, so that each text is tokenized once.

    Attributes:
        queries: One query for each example.
        documents: The distinct documents of all examples.
        positives: For each query, rows of its positives in `documents`.
        negatives: For each query, rows of its hard negatives in `documents`.
        pairs: (query row, document row) of every positive.
    """

    queries: list[str]
    documents: list[str]
    positives: list[list[int]]
    negatives: list[list[int]]
    pairs: list[Item]

    @classmethod
    def of(cls, examples: Sequence[Example]) -> "Corpus":
        """Builds the rows of examples, with one pair for each positive."""
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
    """Collates (epoch, pair) items into the tensors of a batch.

    A document of several queries occurs once in the batch. `positives` lists all positives of
    each query, padded with −1, so that the loss does not treat them as negatives.

    Attributes:
        texts: Tokens of a trained encoder's texts, or vectors of a frozen encoder's.
        negatives: Hard negatives per query, sampled by seed, epoch and query.
        teacher: Vectors of a teacher to add to the batch.
        all_documents: Whether each batch holds every document of the corpus.
    """

    corpus: Corpus
    texts: Mapping[Role, Tokens | FloatArray]
    negatives: int
    seed: int
    teacher: TeacherVectors | None = None
    all_documents: bool = False

    def __post_init__(self) -> None:
        if self.teacher is not None:
            queries, documents = self.corpus.queries, self.corpus.documents
            self._teacher_queries = self.teacher.rows([Text("query", q) for q in queries])
            self._teacher_documents = self.teacher.rows([Text("document", d) for d in documents])

    def __call__(self, items: Sequence[Item]) -> Batch:
        """Returns the batch of (epoch, pair) items: n queries and m distinct documents.

        Per side it holds `…_ids` and `…_mask`, int64 [texts, length], or `…_vectors`, float32
        [texts, dimension]. `documents`, int64 [m], are rows of the corpus; `positives`, int64
        [n, p], are such rows too; `targets`, int64 [n], is the column of each query's own
        positive. With a teacher there are `teacher_queries` and `teacher_documents`.
        """
        corpus = self.corpus
        pairs = [corpus.pairs[pair] for _, pair in items]
        queries, targets = [query for query, _ in pairs], [document for _, document in pairs]
        distinct = dict.fromkeys(targets)
        for (epoch, _), query in zip(items, queries, strict=True):
            distinct |= dict.fromkeys(self._sample_negatives(epoch, query))
        if self.all_documents:
            distinct |= dict.fromkeys(range(len(corpus.documents)))
        documents = list(distinct)
        column_of = {document: column for column, document in enumerate(documents)}
        columns = zip_longest(*(corpus.positives[query] for query in queries), fillvalue=-1)
        batch = {
            **_model_inputs("query", self.texts["query"], queries),
            **_model_inputs("document", self.texts["document"], documents),
            "documents": torch.tensor(documents),
            "positives": torch.tensor(list(columns)).T,
            "targets": torch.tensor([column_of[document] for document in targets]),
        }
        if self.teacher is not None:
            rows = self._teacher_queries[queries], self._teacher_documents[documents]
            batch["teacher_queries"] = torch.from_numpy(self.teacher.take(rows[0]))
            batch["teacher_documents"] = torch.from_numpy(self.teacher.take(rows[1]))
        return batch

    def _sample_negatives(self, epoch: int, query: int) -> list[int]:
        negatives = self.corpus.negatives[query]
        if len(negatives) <= self.negatives:
            return negatives
        generator = np.random.default_rng([self.seed, epoch, query])
        sampled = generator.choice(len(negatives), self.negatives, replace=False)
        return [negatives[i] for i in sampled]


def align_batch(
    tokens: Tokens, teacher: TeacherVectors, rows: RowArray, items: Sequence[Item]
) -> Batch:
    """Returns the batch of (epoch, text) items, with the teacher's vectors as targets.

    `rows`, int64 [texts], is the row of each text among the teacher's vectors. The batch holds
    `query_ids` and `query_mask`, int64 [n, length], and `teacher`, float32 [n, dimension].
    """
    texts = [text for _, text in items]
    vectors = torch.from_numpy(teacher.take(rows[texts]))
    return _model_inputs("query", tokens, texts) | {"teacher": vectors}


def _model_inputs(role: Role, texts: Tokens | FloatArray, rows: list[int]) -> Batch:
    if isinstance(texts, Tokens):
        ids, mask = texts.padded(rows)
        return {f"{role}_ids": ids, f"{role}_mask": mask}
    return {f"{role}_vectors": torch.from_numpy(texts[rows])}
