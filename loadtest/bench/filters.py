"""Time to find the rows of a filter with many fields and values, on one thread."""

import logging
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from core.filters import FILE_NAME, FilterReader, FilterWriter
from core.types import Filter
from loadtest.bench import results
from loadtest.bench.options import FilterBenchOptions
from loadtest.bench.processes import options_json

_REPEATS = 9
_GOAL_MS = 50.0

_log = logging.getLogger(__name__)


def run(options: FilterBenchOptions) -> None:
    """Measures and writes `filters-<rows>.json`."""
    figures = []
    for distinct in options.distinct:
        folder = options.cache / f"filters-{options.rows}x{options.fields}-{distinct}"
        folder.mkdir(parents=True, exist_ok=True)
        fields = write_filters(folder, options, distinct)
        figures.append(_measure(folder / FILE_NAME, fields, options, distinct))
        _log.info("%s: %.1f ms", figures[-1]["name"], figures[-1]["reached"])
    result = {
        "benchmark": "filters",
        "environment": results.describe(),
        "options": options_json(options),
        "figures": figures,
    }
    _log.info("wrote %s", results.write(result, options.out / f"filters-{options.rows}.json"))


def write_filters(folder: Path, options: FilterBenchOptions, distinct: int) -> dict[str, int]:
    """Writes the filters of rows whose fields have random values; returns the fields."""
    random = np.random.default_rng(options.seed)
    names = [f"field-{i}" for i in range(options.fields)]
    with FilterWriter(folder / FILE_NAME) as writer:
        for row in range(options.rows):
            values = random.integers(0, distinct, options.fields).tolist()
            writer.add(row, {name: _value(v) for name, v in zip(names, values, strict=True)})
    return writer.fields()


def _measure(
    path: Path, fields: dict[str, int], options: FilterBenchOptions, distinct: int
) -> dict[str, Any]:
    values = [_value(i) for i in range(min(options.values, distinct))]
    filter_: Filter = dict.fromkeys(fields, values)
    spent, matching = [], 0
    for _ in range(_REPEATS):
        # A reader keeps the rows of recent filters.
        reader = FilterReader(path, fields, options.rows)
        started = time.thread_time()
        rows = reader.rows(reader.check(filter_))
        spent.append(1000 * (time.thread_time() - started))
        matching = len(rows)
    name = f"{len(fields)} fields × {len(values)} of {distinct:,} values, {options.rows:,} rows"
    note = f"CPU time, median of {_REPEATS}; {matching:,} rows match"
    return results.figure(name, median(spent), "<=", _GOAL_MS, "ms", note)


def _value(number: int) -> str:
    return f"值{number:07}"
