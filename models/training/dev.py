"""nDCG@10 on a split of questions, measured while a stage trains."""

import numpy as np
import torch

from core.types import FloatArray, Role
from models.evaluation.scores import score
from models.training.data import DevSet
from models.training.encoder import Encoder, Tokens, encode, tokenizer
from models.training.recipe import Precision

_DEPTH = 100


class Measurement:
    """Measures a pair of encoders by exact search.

    Args:
        dev: Queries, documents and judgements.
        query: Encodes the queries, or their vectors if their encoder is frozen.
        document: The same of the documents.
        batch: Texts encoded at a time.
        precision: Type of the arithmetic.
    """

    def __init__(
        self,
        dev: DevSet,
        query: Encoder | FloatArray,
        document: Encoder | FloatArray,
        *,
        batch: int,
        precision: Precision,
    ) -> None:
        self._dev = dev
        self._batch, self._precision = batch, precision
        self._queries = _prepare(query, "query", list(dev.queries.values()))
        self._documents = _prepare(document, "document", list(dev.documents.values()))

    def __call__(self) -> dict[str, float]:
        """Returns the mean of each measure of `models.evaluation.scores`."""
        queries = self._vectors(self._queries, "dev queries")
        documents = self._vectors(self._documents, "dev documents")
        return score(self._dev.qrels, search(self._dev, queries, documents))

    def _vectors(self, texts: tuple[Encoder, Tokens] | FloatArray, label: str) -> FloatArray:
        if not isinstance(texts, tuple):
            return texts
        return encode(*texts, batch=self._batch, precision=self._precision, label=label)


def _prepare(
    encoder: Encoder | FloatArray, role: Role, texts: list[str]
) -> tuple[Encoder, Tokens] | FloatArray:
    if not isinstance(encoder, Encoder):
        return encoder
    prompt = getattr(encoder.side.start.prompts, role)
    return encoder, Tokens.of(tokenizer(encoder.side, prompt), texts)


def search(dev: DevSet, queries: FloatArray, documents: FloatArray) -> dict[str, dict[str, float]]:
    """Returns for each query its 100 nearest documents with their cosines."""
    ids = np.array(list(dev.documents))
    depth = min(_DEPTH, len(ids))
    run: dict[str, dict[str, float]] = {}
    found = torch.from_numpy(np.array(documents))
    for start in range(0, len(queries), 256):
        batch = torch.from_numpy(np.array(queries[start : start + 256]))
        scores, rows = (batch @ found.T).topk(depth, dim=1)
        for i, query in enumerate(list(dev.queries)[start : start + 256]):
            names = ids[rows[i].numpy()].tolist()
            run[query] = dict(zip(names, scores[i].tolist(), strict=True))
    return run
