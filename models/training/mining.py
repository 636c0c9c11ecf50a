"""Hard negatives: documents that an encoder ranks high and nobody judged relevant."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from core.files import write_text
from core.types import FloatArray
from models.training.batches import Corpus
from models.training.recipe import Mine

_QUERIES = 256


def mine(
    queries: FloatArray,
    documents: FloatArray,
    positives: Sequence[Sequence[int]],
    stage: Mine,
) -> list[list[int]]:
    """Finds hard negatives by exact search, within a window of ranks and below a margin.

    Args:
        queries: float32 [n, d], unit norm.
        documents: float32 [m, d], unit norm.
        positives: Rows of the relevant documents of each query.
        stage: Ranks, margin and number; positives have no rank.

    Returns:
        Rows of the negatives of each query, the hardest first.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = torch.from_numpy(np.array(documents)).to(device)
    mined: list[list[int]] = []
    for start in tqdm(range(0, len(queries), _QUERIES), desc="mining", unit="batch", leave=False):
        batch = torch.from_numpy(np.array(queries[start : start + _QUERIES])).to(device)
        scores = batch @ found.T
        lowest = []
        for row, known in enumerate(positives[start : start + _QUERIES]):
            lowest.append(scores[row, list(known)].min())
            scores[row, list(known)] = -torch.inf
        positive = torch.stack(lowest)
        # A part of a negative score would be a higher one.
        limit = positive - (1 - stage.margin) * positive.abs()
        best = scores.topk(min(stage.last, len(found)), dim=1)
        for row in range(len(batch)):
            window = slice(stage.first - 1, stage.last)
            values, rows = best.values[row, window], best.indices[row, window]
            fit = (values <= limit[row]) & (values > -torch.inf)
            mined.append(rows[fit][: stage.negatives].tolist())
    return mined


def write_triples(
    path: Path, corpus: Corpus, documents: Sequence[str], mined: Sequence[Sequence[int]]
) -> None:
    """Writes triples as JSONL; a query without a negative is among them.

    Args:
        path: The file.
        corpus: Queries with their positives.
        documents: The texts that `mined` names by rows.
        mined: Rows of the negatives of each query.
    """
    lines = [
        json.dumps(
            {
                "query": query,
                "positives": [corpus.documents[row] for row in corpus.positives[number]],
                "negatives": [documents[row] for row in mined[number]],
            },
            ensure_ascii=False,
        )
        for number, query in enumerate(corpus.queries)
    ]
    write_text(path, "".join(f"{line}\n" for line in lines))
