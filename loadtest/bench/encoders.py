"""Speed of encoders, measured alternately: query encoders, and document encoders by engine."""

import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from core.encoders import Encoder, Encoding
from core.errors import DataError, ProviderError
from core.provenance import commit, environment, hardware
from core.text import normalize_text
from loadtest.traffic import read_texts
from models.encoders.factory import (
    EncoderOptions,
    document_encoder,
    load_encoder,
    resolve_dtype,
    weights_bytes,
)
from models.pairs import load_pair

BATCH = 32
_ALONE, _BATCHES = "alone", "batches"
# Documents that each engine encodes in a round.
DOCUMENTS = 128
_OPENVINO = ("float32", "bfloat16", "int8")


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
    texts = _texts(queries)
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


def compare_documents(pair: str, corpus: Path, threads: int, rounds: int) -> dict[str, Any]:
    """Compares the document encoder of a pair in ONNX Runtime and in OpenVINO, by dtype.

    The first `DOCUMENTS` texts are encoded in batches of similar length, as in a build. Dtypes
    that the processor has no instructions for are left out.

    Args:
        pair: Name or TOML file of the pair, whose document encoder is an ONNX file.
        corpus: JSONL with `text`.
        threads: Threads of an encoder.
        rounds: Number of rounds.

    Returns:
        Hardware, versions and options; and for each engine and dtype, medians over rounds:
        `tokens_per_second`, without padding; `ms`, `cpu_ms`, `ratio` and `cpu_ratio` as in
        `compare`, relative to ONNX Runtime; and `cosine`, the lowest to its vectors.

    Raises:
        DataError: If the corpus cannot be read or is empty.
        PairError: If the pair does not exist or does not load.
        ProviderError: If OpenVINO is not installed.
    """
    texts = sorted(_texts(corpus)[:DOCUMENTS], key=len, reverse=True)
    calls = [texts[i : i + BATCH] for i in range(0, len(texts), BATCH)]
    loaded = load_pair(pair)
    ways = [("onnx", "auto"), *(("openvino", dtype) for dtype in _OPENVINO if _supported(dtype))]
    encoders = [
        document_encoder(loaded, EncoderOptions(backend, threads, dtype)) for backend, dtype in ways
    ]
    found = [_encode(encoder, calls) for encoder in encoders]
    tokens = sum(int(part.token_counts.sum()) for part in found[0])
    vectors = [np.concatenate([part.vectors for part in parts]) for parts in found]
    times = list(_rounds(encoders, calls, rounds))
    engines = []
    for i, (backend, dtype) in enumerate(ways):
        medians = _medians(times, i)
        engines.append(
            {
                "backend": backend,
                "dtype": dtype,
                "tokens_per_second": 1000 * tokens / (medians["ms"] * len(texts)),
                "cosine": float((vectors[0] * vectors[i]).sum(axis=1).min()),
                **medians,
            }
        )
    return {
        "hardware": hardware(),
        **environment(),
        "pair": pair,
        "threads": threads,
        "rounds": rounds,
        "batch": BATCH,
        "documents": len(texts),
        "tokens": tokens,
        "engines": engines,
    }


def _supported(dtype: str) -> bool:
    try:
        return bool(resolve_dtype("openvino", dtype))
    except ProviderError:
        return False


def _texts(path: Path) -> list[str]:
    texts = [normalize_text(text) for text in read_texts(path)]
    if not texts:
        message = f"{path} is empty: it must hold texts, one JSON object with text per line"
        raise DataError(message, code="empty_file", path=path)
    return texts


def document_lines(result: dict[str, Any]) -> Iterator[str]:
    """Yields the result of `compare_documents` as lines of text."""
    yield _machine(result)
    yield (
        f"{result['pair']}: {result['documents']} documents, {result['tokens']:,} tokens, batches "
        f"of {result['batch']}; {result['threads']} threads, medians of {result['rounds']} rounds; "
        "×: rate divided by that of ONNX Runtime; cosine: lowest to its vectors"
    )
    yield f"{'engine':8} {'dtype':8} {'tokens/s':>8} {'×':>6} {'CPU ×':>6} {'cosine':>7}"
    for entry in result["engines"]:
        yield (
            f"{entry['backend']:8} {entry['dtype']:8} {entry['tokens_per_second']:>8,.0f} "
            f"{entry['ratio']:>6.2f} {entry['cpu_ratio']:>6.2f} {entry['cosine']:>7.4f}"
        )


def _machine(result: dict[str, Any]) -> str:
    machine, libraries = result["hardware"], result["libraries"]
    versions = ", ".join(f"{name} {version}" for name, version in libraries.items())
    return f"{machine['processor']}, {machine['processors']} processors; {versions}"


def lines(result: dict[str, Any]) -> Iterator[str]:
    """Yields the result of `compare` as lines of text."""
    yield _machine(result)
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


def _encode(encoder: Encoder, calls: Iterable[list[str]]) -> list[Encoding]:
    return [encoder.encode(texts) for texts in calls]


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
