"""Speed of query encoders, measured alternately."""

import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from core.encoders import Encoder
from core.errors import DataError
from core.provenance import commit, environment, hardware
from core.text import normalize_text
from loadtest.traffic import read_texts
from models.encoders.factory import load_encoder, weights_bytes
from models.pairs import load_pair

BATCH = 32


def compare(pairs: Sequence[str], queries: Path, threads: int, rounds: int) -> dict[str, Any]:
    """Compares the speed of the query encoders of pairs, tokenization included.

    In each round all encoders encode the same queries, in turn. Other load on the machine changes
    the wall time of all of them; CPU time changes less.

    Returns:
        Date, commit, hardware, versions and options; and for each pair the size of its graph
        [10⁶ bytes] and, for single queries and for batches, medians over rounds: `ms` and `cpu_ms`,
        wall and CPU time per query; `ratio` and `cpu_ratio`, the rates divided by those of the
        first pair.
    """
    texts = [normalize_text(text) for text in read_texts(queries)]
    if not texts:
        message = f"{queries} is empty: it must hold texts, one JSON object with text per line"
        raise DataError(message, code="empty_file", path=queries)
    batches = [texts[i : i + BATCH] for i in range(0, len(texts), BATCH)]
    # Full batches only, unless there are fewer queries.
    batches = [batch for batch in batches if len(batch) == BATCH] or batches
    ways = {"alone": [[text] for text in batches[0]], "batches": batches}
    loaded = [load_pair(name) for name in pairs]
    encoders = [load_encoder(pair.query, pair.folder, threads) for pair in loaded]
    times = {way: _times(encoders, calls, rounds) for way, calls in ways.items()}
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "hardware": hardware(),
        **environment(),
        "threads": threads,
        "rounds": rounds,
        "batch": len(batches[0]),
        "queries": {way: sum(map(len, calls)) for way, calls in ways.items()},
        "encoders": [
            {
                "pair": name,
                "megabytes": weights_bytes(pair.query, pair.folder) / 1e6,
                **{way: found[i] for way, found in times.items()},
            }
            for i, (name, pair) in enumerate(zip(pairs, loaded, strict=True))
        ],
    }


def lines(result: dict[str, Any]) -> Iterator[str]:
    """Yields the result of `compare` as lines of text."""
    machine = result["hardware"]
    versions = ", ".join(f"{name} {version}" for name, version in result["libraries"].items())
    yield f"{machine['processor']}, {machine['processors']} processors; {versions}"
    yield f"{result['threads']} threads, medians of {result['rounds']} rounds, batches of " + (
        f"{result['batch']}; ×: rate divided by that of the first row, by wall and by CPU time"
    )
    width = max(len(entry["pair"]) for entry in result["encoders"])
    head = f"{'ms':>7} {'CPU ms':>7} {'×':>6} {'CPU ×':>6}"
    yield f"{'':{width}} {'':>7}  {'one query at a time':>29}  {'in batches, per query':>29}"
    yield f"{'pair':{width}} {'MB':>7}  {head}  {head}"
    for entry in result["encoders"]:
        cells = "  ".join(
            f"{found['ms']:>7.3f} {found['cpu_ms']:>7.3f} "
            f"{found['ratio']:>6.2f} {found['cpu_ratio']:>6.2f}"
            for found in (entry["alone"], entry["batches"])
        )
        yield f"{entry['pair']:{width}} {entry['megabytes']:>7.1f}  {cells}"


def _times(
    encoders: Sequence[Encoder], calls: Sequence[list[str]], rounds: int
) -> list[dict[str, float]]:
    """Returns the medians of `ms`, `cpu_ms`, `ratio` and `cpu_ratio` for each encoder.

    The order of encoders is reversed in every second round. The first pass is not measured.
    """

    def encode(encoder: Encoder) -> None:
        for texts in calls:
            encoder.encode(texts)

    for encoder in encoders:
        encode(encoder)
    # Wall and CPU time per text [ms], float64 [rounds, encoders, 2].
    times = np.empty((rounds, len(encoders), 2))
    for number in range(rounds):
        for i in range(len(encoders))[:: -1 if number % 2 else 1]:
            started, worked = time.perf_counter(), time.process_time()
            encode(encoders[i])
            times[number, i] = time.perf_counter() - started, time.process_time() - worked
    times *= 1000 / sum(map(len, calls))
    each = np.median(np.concatenate([times, times[:, :1] / times], axis=2), axis=0)
    names = ("ms", "cpu_ms", "ratio", "cpu_ratio")
    return [dict(zip(names, map(float, row), strict=True)) for row in each]
