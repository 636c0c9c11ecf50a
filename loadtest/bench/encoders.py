"""Speed of query encoders, measured alternately: queries one at a time, and batches of 32."""

import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from core.encoders import Encoder
from core.errors import DataError
from core.provenance import commit, environment, hardware
from core.text import normalize_text
from loadtest.traffic import read_texts
from models.encoders.factory import load_encoder, weights_bytes
from models.pairs import load_pair

BATCH = 32
_ALONE, _BATCHES = "alone", "batches"


def compare(pairs: Sequence[str], queries: Path, threads: int, rounds: int) -> dict[str, Any]:
    """Compares the speed of the query encoders of pairs, tokenization included.

    In each round all encoders encode the same queries, in turn. Other load on the machine changes
    the wall time of all of them; CPU time changes less.

    Args:
        pairs: Names or TOML files of the pairs; ratios are relative to the first one.
        queries: JSONL with `text`.
        threads: Threads of ONNX Runtime.
        rounds: Number of rounds.

    Returns:
        Date, commit, hardware, versions and options; and for each pair the size of its graph
        [10⁶ bytes] and, for single queries and for batches, medians over rounds: `ms` and `cpu_ms`,
        wall and CPU time per query; `ratio` and `cpu_ratio`, the rates divided by those of the
        first pair.

    Raises:
        DataError: If the file of queries cannot be read or is empty.
        PairError: If a pair does not exist or does not load.
    """
    texts = [normalize_text(text) for text in read_texts(queries)]
    if not texts:
        message = f"{queries} is empty: it must hold queries, one JSON object with text per line"
        raise DataError(message, code="empty_file", path=queries)
    batches = [texts[i : i + BATCH] for i in range(0, len(texts), BATCH)]
    # Full batches only, unless there are fewer queries.
    batches = [batch for batch in batches if len(batch) == BATCH] or batches
    ways = {_ALONE: [[text] for text in batches[0]], _BATCHES: batches}
    loaded = [load_pair(name) for name in pairs]
    encoders = [load_encoder(pair.query, pair.folder, threads) for pair in loaded]
    times = {way: list(_rounds(encoders, calls, rounds)) for way, calls in ways.items()}
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
                **{way: _medians(found, i) for way, found in times.items()},
            }
            for i, (name, pair) in enumerate(zip(pairs, loaded, strict=True))
        ],
    }


def lines(result: dict[str, Any]) -> Iterator[str]:
    """Yields the result of `compare` as lines of text."""
    machine, libraries = result["hardware"], result["libraries"]
    versions = ", ".join(f"{name} {version}" for name, version in libraries.items())
    yield f"{machine['processor']}, {machine['processors']} processors; {versions}"
    yield (
        f"{result['threads']} threads, medians of {result['rounds']} rounds; times per query; "
        "×: rate divided by that of the first pair, by wall and by CPU time"
    )
    single, batch = f"{'one at a time':>29}", f"in batches of {result['batch']}"
    width = max(len(entry["pair"]) for entry in result["encoders"])
    yield f"{'':{width}} {'':>7}  {single}  {batch:>29}"
    head = f"{'ms':>7} {'CPU ms':>7} {'×':>6} {'CPU ×':>6}"
    yield f"{'pair':{width}} {'MB':>7}  {head}  {head}"
    for entry in result["encoders"]:
        cells = "  ".join(_cells(entry[way]) for way in (_ALONE, _BATCHES))
        yield f"{entry['pair']:{width}} {entry['megabytes']:>7.1f}  {cells}"


def _rounds(
    encoders: Sequence[Encoder], calls: Sequence[list[str]], rounds: int
) -> Iterator[list[tuple[float, float]]]:
    """Yields wall and CPU time per query [ms] of each encoder, for each round.

    The order of encoders is reversed in every second round. The first pass is not measured.
    """
    count = sum(map(len, calls))
    for encoder in encoders:
        _encode(encoder, calls)
    for number in range(rounds):
        found = {}
        for i in range(len(encoders))[:: -1 if number % 2 else 1]:
            started, worked = time.perf_counter(), time.process_time()
            _encode(encoders[i], calls)
            spent = time.perf_counter() - started, time.process_time() - worked
            found[i] = 1000 * spent[0] / count, 1000 * spent[1] / count
        yield [found[i] for i in range(len(encoders))]


def _encode(encoder: Encoder, calls: Iterable[list[str]]) -> None:
    for texts in calls:
        encoder.encode(texts)


def _medians(rounds: Sequence[Sequence[tuple[float, float]]], encoder: int) -> dict[str, float]:
    wall, cpu = ([found[encoder][i] for found in rounds] for i in (0, 1))
    ratios = [[found[0][i] / found[encoder][i] for found in rounds] for i in (0, 1)]
    names = ("ms", "cpu_ms", "ratio", "cpu_ratio")
    return dict(zip(names, map(median, (wall, cpu, *ratios)), strict=True))


def _cells(found: dict[str, float]) -> str:
    return (
        f"{found['ms']:>7.3f} {found['cpu_ms']:>7.3f} "
        f"{found['ratio']:>6.2f} {found['cpu_ratio']:>6.2f}"
    )
