import numpy as np
import pytest

from core.records import Triple
from training.batches import BatchPlan, PairCollator
from training.corpus import Corpus
from training.encoder import Tokens

pytestmark = pytest.mark.train


def tokens_of(count: int) -> Tokens:
    return Tokens(np.arange(count, dtype=np.int32), np.arange(count + 1))


def test_a_batch_holds_each_document_once_and_knows_all_positives() -> None:
    found = [
        Triple("a", ("x", "y"), ("z",)),
        Triple("b", ("y",), ("x",)),
        Triple("c", ("z",)),
    ]
    corpus = Corpus.of(found)
    texts_of = {
        "query": tokens_of(len(corpus.queries)),
        "document": tokens_of(len(corpus.documents)),
    }
    collate = PairCollator(corpus, texts_of, 1, seed=0)
    batch = collate([(0, 0), (0, 2), (0, 3)])
    names = [corpus.documents[row] for row in batch["documents"]]
    assert sorted(names) == ["x", "y", "z"]
    assert [names[column] for column in batch["targets"]] == ["x", "y", "z"]
    known = [{corpus.documents[r] for r in row if r >= 0} for row in batch["positives"].tolist()]
    assert known == [{"x", "y"}, {"y"}, {"z"}]


def test_all_documents_can_be_in_each_batch() -> None:
    corpus = Corpus.of([Triple("a", ("x",)), Triple("b", ("y",)), Triple("c", ("z",))])
    vectors = np.eye(3, dtype=np.float32)
    texts_of = {"query": tokens_of(3), "document": vectors}
    batch = PairCollator(corpus, texts_of, 0, seed=0, all_documents=True)([(0, 1), (0, 2)])
    assert sorted(batch["documents"].tolist()) == [0, 1, 2]
    assert batch["documents"][batch["targets"]].tolist() == [1, 2]
    assert batch["document_vectors"].tolist() == vectors[batch["documents"].numpy()].tolist()


def test_negatives_are_sampled_by_seed_and_epoch() -> None:
    corpus = Corpus.of([Triple("a", ("x",), tuple("bcdefghijk"))])
    texts_of = {"query": tokens_of(1), "document": tokens_of(11)}

    def drawn(seed: int, epoch: int) -> list[int]:
        rows: list[int] = PairCollator(corpus, texts_of, 3, seed)([(epoch, 0)])[
            "documents"
        ].tolist()
        assert len(set(rows)) == 4
        return rows

    assert drawn(0, 0) == drawn(0, 0)
    assert len({tuple(drawn(seed, epoch)) for seed in range(3) for epoch in range(3)}) > 5


def test_a_plan_depends_on_its_seed_and_has_each_example_once_per_epoch() -> None:
    lengths = np.random.default_rng(0).integers(1, 100, 103)
    plan = BatchPlan(103, 3, 10, 0, lengths)
    batches = list(plan)
    assert batches == list(BatchPlan(103, 3, 10, 0, lengths))
    assert batches != list(BatchPlan(103, 3, 10, 1, lengths))
    assert len(batches) == len(plan) == 30
    for epoch in range(3):
        rows = [row for batch in batches for e, row in batch if e == epoch]
        assert len(rows) == len(set(rows)) == 100
    spread = [np.ptp(lengths[[row for _, row in batch]]) for batch in batches]
    mixed = [np.ptp(lengths[[row for _, row in batch]]) for batch in BatchPlan(103, 3, 10, 0)]
    assert np.mean(spread) < np.mean(mixed) / 4


def test_fewer_examples_than_a_batch_form_one_batch() -> None:
    assert [len(batch) for batch in BatchPlan(3, 2, 10, 0)] == [3, 3]
