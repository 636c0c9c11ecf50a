"""How long the diversity filter takes on many texts, and how much memory: synthetic vectors."""

import os
import platform
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import open_memmap
from tqdm import tqdm

from core.cpus import available_cpus
from core.files import write_text
from core.types import FloatArray
from models.curation.diversify import load_vectors, peak_memory
from models.curation.diversity import DiversityOptions, DiversityRule, diversify
from models.curation.records import markdown_table, provenance, write_json
from models.curation.work import output_folder

_BLOCK = 16_384
# Texts of one subject: cosines within a subject lie around 0.8, and near 0 between subjects.
_SUBJECT_SIZE = 4
_SPREAD = 0.5


def clustered_vectors(path: Path, count: int, dimension: int, seed: int) -> FloatArray:
    """Writes unit vectors, float32 [count, dimension], that lie in small clusters.

    A vector is its cluster's centre and noise of `_SPREAD` times its length; clusters are
    drawn at random, of `_SUBJECT_SIZE` vectors in the mean.
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


def measure_scale(
    output: Path, count: int, dimension: int, rule: DiversityRule, threads: int
) -> dict[str, Any]:
    """Filters synthetic vectors; writes time and memory as scale.json and scale.md.

    Raises:
        CareError: If the folder cannot be written.
    """
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
