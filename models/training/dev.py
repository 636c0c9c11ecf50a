"""nDCG@10 on a split of questions, measured while a stage trains."""

import numpy as np
import torch

from core.types import FloatArray
from models.evaluation.scores import score
from models.training.data import DevSet
from models.training.encoder import Encoder, Tokens, encode, tokenizer
from models.training.recipe import Precision

_DEPTH = 100


class Measurement:
    """Measures a pair of encoders by exact search.

    The documents of an encoder that is not trained are encoded once.

    Args:
        dev: Queries, documents and judgements.
        query: Encodes the queries.
        document: Encodes the documents.
        batch: Texts encoded at a time.
        precision: Type of the arithmetic.
    """

    def __init__(
        self,
        dev: DevSet,
        query: Encoder,
        document: Encoder,
        *,
        batch: int,
        precision: Precision,
    ) -> None:
        self._dev, self._query, self._document = dev, query, document
        self._batch, self._precision = batch, precision
        ask = tokenizer(query.side, query.side.start.prompts.query)
        find = tokenizer(document.side, document.side.start.prompts.document)
        self._queries = Tokens.of(ask, list(dev.queries.values()))
        self._documents = Tokens.of(find, list(dev.documents.values()))
        self._found: FloatArray | None = None

    def __call__(self) -> dict[str, float]:
        """Returns the mean of each measure of `models.evaluation.scores`."""
        documents = self._found
        if documents is None:
            documents = self._encode(self._document, self._documents, "dev documents")
            if not self._document.trainable:
                self._found = documents
        queries = self._encode(self._query, self._queries, "dev queries")
        return score(self._dev.qrels, search(self._dev, queries, documents))

    def _encode(self, encoder: Encoder, tokens: Tokens, label: str) -> FloatArray:
        return encode(encoder, tokens, batch=self._batch, precision=self._precision, label=label)


def search(dev: DevSet, queries: FloatArray, documents: FloatArray) -> dict[str, dict[str, float]]:
    """Returns for each query its 100 nearest documents with their cosines."""
    ids = np.array(list(dev.documents))
    depth = min(_DEPTH, len(ids))
    run: dict[str, dict[str, float]] = {}
    found = torch.from_numpy(documents)
    for start in range(0, len(queries), 256):
        batch = torch.from_numpy(queries[start : start + 256])
        scores, rows = (batch @ found.T).topk(depth, dim=1)
        for i, query in enumerate(list(dev.queries)[start : start + 256]):
            names = ids[rows[i].numpy()].tolist()
            run[query] = dict(zip(names, scores[i].tolist(), strict=True))
    return run
