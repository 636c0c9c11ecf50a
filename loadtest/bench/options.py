from dataclasses import dataclass
from pathlib import Path


class BenchError(Exception):
    """A benchmark cannot be run; the message says what to do about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the scenarios are given.

    Attributes:
        indexes: Folder of the indexes.
        index: Name of the index that is searched.
        pair: The pair that it was built with: a registered name or a .toml.
        queries: JSONL with `text`.
        out: Folder of the results.
        weights: Folder that `loadtest.bench.weights` wrote.
        sentence_transformers: Python of the environment with sentence-transformers.
        infinity: Python of the environment with infinity-emb.
        seconds: Length of one measurement [s].
        rounds: Measurements of each kind; kinds alternate.
        connections: Clients at once where the service should be full.
        top_k: Hits wanted of each question.
    """

    indexes: Path
    index: str
    pair: str
    queries: Path
    out: Path
    weights: Path
    sentence_transformers: Path
    infinity: Path
    seconds: int = 8
    rounds: int = 3
    connections: int = 64
    top_k: int = 10
