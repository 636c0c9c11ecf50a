"""Functions of several commands: output folder, endpoints, samples, tables."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from core.files import remove_temporary
from core.locks import exclusive
from core.records import write_json, write_jsonl
from curation.config import Command, Endpoint
from curation.llm import LanguageModels

CACHE = "cache"
COST = "cost.json"


@contextmanager
def output_folder(folder: Path) -> Iterator[Path]:
    """Creates an output folder and locks it: other commands that write to it fail."""
    with exclusive(folder, "curate"):
        remove_temporary(folder)
        yield folder


@contextmanager
def language_models(config: Command, endpoints: Sequence[Endpoint]) -> Iterator[LanguageModels]:
    """Yields endpoints whose calls are cached in the output folder.

    When the block ends, with or without an error, costs and invalid answers are written.
    """
    folder = config.output
    ledger = folder / CACHE / "calls.sqlite"
    with LanguageModels(endpoints, ledger, config.budget, config.attempts) as models:
        try:
            yield models
        finally:
            write_json(folder / COST, models.costs())
            write_jsonl(folder / "invalid-answers.jsonl", map(asdict, models.invalid))


def sample_key(seed: int, *parts: str) -> str:
    """Returns a sort key: a pseudo-random order that depends on `seed` and the parts alone."""
    return hashlib.sha256("\0".join([str(seed), *parts]).encode()).hexdigest()


def shuffled(ids: Iterable[str], seed: int, *parts: str) -> list[str]:
    """Returns ids in pseudo-random order, by the `sample_key` of the parts and the id."""
    return sorted(ids, key=lambda id_: sample_key(seed, *parts, id_))


def sample_queries(queries: Mapping[str, str], limit: int | None, seed: int) -> dict[str, str]:
    """Returns a random sample of at most `limit` queries, in the given order."""
    chosen = set(shuffled(queries, seed)[:limit])
    return {id_: text for id_, text in queries.items() if id_ in chosen}


def split_queries(
    queries: Mapping[str, str], splits: Mapping[str, int | None], seed: int
) -> dict[str, list[str]]:
    """Returns disjoint random samples of the ids of queries, by split, in the given order.

    Splits are filled one after the other; None takes all queries that are left.
    """
    left = shuffled(queries, seed, "split")
    chosen = {}
    for split, count in splits.items():
        taken, left = (left, []) if count is None else (left[:count], left[count:])
        members = set(taken)
        chosen[split] = [id_ for id_ in queries if id_ in members]
    return chosen


def markdown_table(header: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Returns a Markdown table; floats have three decimals."""
    lines = [header, ["---"] * len(header), *rows]
    cells = ([f"{v:.3f}" if isinstance(v, float) else str(v) for v in row] for row in lines)
    return "".join("| " + " | ".join(row) + " |\n" for row in cells)
