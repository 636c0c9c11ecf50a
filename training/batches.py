"""Batch sampling, and collation of examples into tensors."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from core.encoders import Role
from core.rows import blocks
from core.shards import ShardedVectors
from core.types import FloatArray, RowArray
from training.corpus import Corpus
from training.encoder import Tokens
from training.vectors import TeacherVectors

# Batches per group: texts are shuffled into groups and sorted by length within a group.
_GROUP = 32
# Prefix of the names of tensors of further examples in a batch.
EXAMPLES = "examples_"
Item = tuple[int, int]
Batch = dict[str, Tensor]


class BatchPlan(Dataset[Any]):
    """Batch sampler of all epochs; each batch is a list of (epoch, example).

    The batches depend on the arguments alone, so a resumed run skips the batches that it has
    already seen. The incomplete last batch of an epoch is dropped. With `lengths`, integers
    [count], the tokens of each example, a batch holds examples of similar length. A data loader
    uses the same object as dataset: its items are the (epoch, example) pairs themselves.
    """

    drop_last = True

    def __init__(
        self,
        count: int,
        epochs: int,
        batch_size: int,
        seed: int,
        lengths: NDArray[Any] | None = None,
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
                for rows in blocks(len(order), _GROUP * self.batch_size):
                    group = order[rows]
                    order[rows] = group[np.argsort(self._lengths[group], kind="stable")]
            batches = order.reshape(-1, self.batch_size)
            for number in generator.permutation(len(batches)):
                yield [(epoch, row) for row in batches[number].tolist()]


@dataclass
class PairCollator:
    """Collates (epoch, pair) items; a document of several queries occurs once in the batch.

    `positives` lists all positives of each query, padded with −1, so that the loss does not
    treat them as negatives.
    """

    corpus: Corpus
    # Tokens of a trained encoder's texts, or vectors of a frozen encoder's.
    texts: Mapping[Role, Tokens | ShardedVectors | FloatArray]
    negatives: int  # hard negatives per query, sampled by seed, epoch and query
    seed: int
    teacher: TeacherVectors | None = None  # vectors of a teacher to add to the batch
    all_documents: bool = False  # whether each batch holds every document of the corpus

    def __post_init__(self) -> None:
        if self.teacher is not None:
            self._teacher_queries = self.teacher.rows(self.corpus.query_keys)
            self._teacher_documents = self.teacher.rows(self.corpus.document_keys)

    def __call__(self, items: Sequence[Item]) -> Batch:
        """Returns the batch of (epoch, pair) items: n queries and m distinct documents.

        Per side it holds `…_ids` and `…_mask`, int64 [texts, length], or `…_vectors`, float32
        [texts, dimension]. `documents`, int64 [m], are rows of the corpus; `positives`, int64
        [n, p], are such rows too; `targets`, int64 [n], is the column of each query's own
        positive. With a teacher there are `teacher_queries` and `teacher_documents`.
        """
        corpus = self.corpus
        pairs = np.array([pair for _, pair in items])
        queries = corpus.positives.row_of(pairs).tolist()
        targets = corpus.positives.values[pairs].tolist()
        distinct = dict.fromkeys(targets)
        for (epoch, _), query in zip(items, queries, strict=True):
            distinct |= dict.fromkeys(self._sample_negatives(epoch, query))
        if self.all_documents:
            distinct |= dict.fromkeys(range(len(corpus.documents)))
        documents = list(distinct)
        column_of = {document: column for column, document in enumerate(documents)}
        known = (corpus.positives[query].tolist() for query in queries)
        columns = zip_longest(*known, fillvalue=-1)
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
        negatives: list[int] = self.corpus.negatives[query].tolist()
        if len(negatives) <= self.negatives:
            return negatives
        generator = np.random.default_rng([self.seed, epoch, query])
        sampled = generator.choice(len(negatives), self.negatives, replace=False)
        return [negatives[i] for i in sampled]


@dataclass
class DrawnExamples:
    """Draws a batch of pairs at random for each batch of other items."""

    collate: PairCollator
    batches: Sequence[Sequence[Item]]  # the batches to draw from: (epoch, pair) items
    seed: int  # seed of the draws, which also depend on the first item of the other batch

    def __call__(self, items: Sequence[Item]) -> Batch:
        """Returns the drawn batch, as `PairCollator` does."""
        generator = np.random.default_rng([self.seed, *items[0]])
        return self.collate(self.batches[int(generator.integers(len(self.batches)))])


@dataclass
class AlignCollator:
    """Collates (epoch, number) items of an alignment into the tensors of a batch."""

    tokens: Tokens
    texts: RowArray  # int64 [numbers], row of each item's text in `tokens`
    teacher: TeacherVectors
    targets: RowArray  # int64 [numbers], row of each item's target among the teacher's vectors
    examples: DrawnExamples | None = None  # further pairs of each batch, or None

    def __call__(self, items: Sequence[Item]) -> Batch:
        """Returns `query_ids` and `query_mask`, int64 [n, length], and `teacher`, float32 [n, d].

        The tensors of the examples' batch have the prefix `examples_`.
        """
        numbers = [number for _, number in items]
        vectors = torch.from_numpy(self.teacher.take(self.targets[numbers]))
        batch = _model_inputs("query", self.tokens, self.texts[numbers].tolist())
        batch["teacher"] = vectors
        if self.examples is not None:
            batch |= {f"{EXAMPLES}{name}": found for name, found in self.examples(items).items()}
        return batch


def _model_inputs(
    role: Role, texts: Tokens | ShardedVectors | FloatArray, rows: list[int]
) -> Batch:
    if isinstance(texts, Tokens):
        ids, mask = texts.padded(rows)
        return {f"{role}_ids": ids, f"{role}_mask": mask}
    found = texts[rows] if isinstance(texts, np.ndarray) else texts.take(np.array(rows))
    return {f"{role}_vectors": torch.from_numpy(found)}
