"""nDCG@10 on a split of questions, measured while a stage trains."""

from collections.abc import Callable, Mapping

import numpy as np

from core.encoders import Role
from core.types import FloatArray
from evaluation.beir import Run
from evaluation.metrics import score
from stores.exact import exact_search
from training.data import DevSet
from training.encoder import Encoder, encode, tokenize
from training.schema import Precision

_DEPTH = 100


def measurement(
    dev: DevSet, encoders: Mapping[Role, Encoder | FloatArray], batch: int, precision: Precision
) -> Callable[[], dict[str, float]]:
    """Returns a function that returns the mean of each measure of `evaluation.metrics`.

    For each role there is its encoder or, if that is frozen, the vectors of the texts.
    """
    tokens = {
        role: tokenize(e.checkpoint, getattr(e.checkpoint.init.prompts, role), dev.texts(role))
        for role, e in encoders.items()
        if isinstance(e, Encoder)
    }

    def vectors(role: Role) -> FloatArray:
        encoder = encoders[role]
        if not isinstance(encoder, Encoder):
            return encoder
        label = f"dev, {role}"
        return encode(encoder, tokens[role], batch=batch, precision=precision, label=label)

    return lambda: score(dev.qrels, search(dev, vectors("query"), vectors("document")))


def search(dev: DevSet, queries: FloatArray, documents: FloatArray) -> Run:
    """Returns for each query its 100 nearest documents with their cosines."""
    ids = np.array(list(dev.documents))
    scores, rows = exact_search(queries, documents, min(_DEPTH, len(ids)))
    return {
        query: dict(zip(ids[rows[i]].tolist(), scores[i].tolist(), strict=True))
        for i, query in enumerate(dev.queries)
    }
