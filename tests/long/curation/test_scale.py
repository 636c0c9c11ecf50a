"""Time and memory of the diversity filter on many texts, with synthetic vectors."""

import os
import platform
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.lib.format import open_memmap
from tqdm import tqdm

from core.files import write_text
from core.machine import available_cpus
from core.records import write_json
from core.types import FloatArray
from curation.common import markdown_table, output_folder
from curation.diversity import (
    DiversityOptions,
    DiversityRule,
    diversify,
    load_vectors,
    peak_memory,
)
from tests.long.curation.conftest import Settings, provenance

_BLOCK = 16_384
# Vectors per subject: cosines are about 0.8 within a subject, and near 0 between subjects.
_SUBJECT_SIZE = 4
_SPREAD = 0.5


def clustered_vectors(path: Path, count: int, dimension: int, seed: int) -> FloatArray:
    """Writes unit vectors, float32 [count, dimension], in small random clusters.

    A vector is the centre of its cluster plus noise of `_SPREAD` times its length. Clusters have
    `_SUBJECT_SIZE` vectors on average.
    """
    vectors = open_memmap(path, "w+", np.float32, (count, dimension))
    for start in tqdm(range(0, count, _BLOCK), desc="vectors", unit=" blocks"):
        rows = min(_BLOCK, count - start)
        draw = np.random.default_rng([seed, start])
        clusters = draw.integers(0, max(1, count // _SUBJECT_SIZE), rows)
        centres = np.stack([_centre(seed, int(cluster), dimension) for cluster in clusters])
        noise = draw.standard_normal((rows, dimension), dtype=np.float32)
        noise *= _SPREAD / np.sqrt(dimension)
        block = centres + noise
        vectors[start : start + rows] = block / np.linalg.norm(block, axis=1, keepdims=True)
    vectors.flush()
    return load_vectors(path, count)


def _centre(seed: int, cluster: int, dimension: int) -> FloatArray:
    centre = np.random.Generator(np.random.SFC64([seed, cluster])).standard_normal(
        dimension, dtype=np.float32
    )
    unit: FloatArray = centre / np.linalg.norm(centre)
    return unit


PAPER = DiversityRule(5, 0.78, 1)


def measure_scale(
    output: Path, count: int, dimension: int, rule: DiversityRule, threads: int
) -> dict[str, Any]:
    """Filters synthetic vectors; writes time and memory as scale.json and scale.md."""
    options = DiversityOptions()
    with output_folder(output):
        path = output / "vectors.npy"
        vectors = clustered_vectors(path, count, dimension, seed=0)
        before = peak_memory()
        started, used = time.perf_counter(), time.process_time()
        result = diversify(vectors, rule, options, threads, output / "scale.checkpoint")
        seconds = time.perf_counter() - started
        report = {
            "texts": count,
            "dimension": dimension,
            "kept": int(result.kept.sum()),
            "rule": asdict(rule),
            "options": asdict(options),
            "index": result.index,
            "threads": threads,
            "seconds": round(seconds, 1),
            "cpu_seconds": round(time.process_time() - used, 1),
            "texts_per_second": round(count / seconds),
            "peak_memory_mib": peak_memory() >> 20,
            "peak_memory_before_mib": before >> 20,
            "processors": available_cpus(),
            "load_average": round(os.getloadavg()[0], 1),
            "machine": platform.machine(),
            **provenance([]),
        }
        write_json(output / "scale.json", report)
        columns = (
            *("texts", "dimension", "kept", "index", "threads", "seconds", "cpu_seconds"),
            *("peak_memory_mib", "load_average"),
        )
        write_text(
            output / "scale.md", markdown_table(columns, [[report[name] for name in columns]])
        )
        path.unlink()
    return report


def test_synthetic_vectors_lie_in_clusters(tmp_path: Path) -> None:
    vectors = clustered_vectors(tmp_path / "v.npy", 400, 32, seed=0)
    cosines = vectors @ vectors.T - np.eye(400)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)
    near = cosines > 0.6
    assert 2 < near.sum(axis=1).mean() < 6
    assert cosines[near].mean() == pytest.approx(0.8, abs=0.03)


def test_scale_is_measured_on_few_texts(tmp_path: Path) -> None:
    report = measure_scale(tmp_path / "out", 8_000, 32, PAPER, threads=1)
    assert report["index"] == "Flat"
    assert 5000 < report["kept"] < 8_000
    assert not list((tmp_path / "out").glob("*.npy"))
    assert "8000" in (tmp_path / "out" / "scale.md").read_text("utf-8")


@pytest.mark.timeout(4 * 3600)
def test_scale(settings: Settings) -> None:
    count = int(os.environ.get("TEXTS", 100_000))
    report = measure_scale(settings.output, count, 384, PAPER, settings.threads)
    print((settings.output / "scale.md").read_text("utf-8"))
    # A third to a half of the texts have too many near neighbours.
    assert 0.5 < report["kept"] / count < 0.8
