"""The diversity filter on files."""

import json
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import numpy as np

from core.errors import CareError
from core.files import atomic, sha256_file
from core.text import document_text
from core.types import FloatArray
from models.curation.diversity import DiversityOptions, DiversityRule, diversify
from models.curation.records import write_json
from models.curation.work import CACHE, output_folder
from models.encoders.cached import encode_cached
from models.encoders.loading import load_encoder
from models.jsonl import read_jsonl, string
from models.pairs import load_pair

Kind = Literal["queries", "documents"]


@dataclass(frozen=True, slots=True)
class VectorSource:
    """Where vectors come from: a side of a pair, or a file of float32 [texts, dimension]."""

    pair: str
    file: Path | None = None
    batch_size: int = 32


def diversify_file(
    texts: Path,
    output: Path,
    kind: Kind,
    rule: DiversityRule,
    options: DiversityOptions,
    source: VectorSource,
    threads: int = 1,
) -> dict[str, Any]:
    """Writes the lines of a JSONL file that the filter keeps, and a report beside them.

    Args:
        texts: JSONL with `text` and, of documents, `title`; other fields are kept.
        output: The file for what is kept; `.report.json` behind its name is the report.
        kind: The side of the pair that encodes.
        rule: The rule.
        options: How it is applied.
        source: Where vectors come from.
        threads: Of encoder and search.

    Returns:
        The report.

    Raises:
        CareError: If a file is wrong.
    """
    started = time.perf_counter()
    lines, contents = _read(texts)
    with output_folder(output.parent):
        vectors = (
            load_vectors(source.file, len(lines))
            if source.file
            else _encode(contents, kind, source, output.parent / CACHE / "vectors", threads)
        )
        encoded = time.perf_counter()
        origin = sha256_file(source.file) if source.file else json.dumps([source.pair, kind])
        name = sha256("\0".join([origin, *contents]).encode()).hexdigest()[:12]
        result = diversify(
            vectors, rule, options, threads, output.with_name(f".{output.name}.{name}.checkpoint")
        )
        with atomic(output) as temporary, temporary.open("w", encoding="utf-8") as file:
            file.writelines(
                f"{line}\n" for line, keep in zip(lines, result.kept, strict=True) if keep
            )
        kept = int(result.kept.sum())
        report = {
            "texts": len(lines),
            "kept": kept,
            "dropped": len(lines) - kept,
            "rule": asdict(rule),
            "options": asdict(options),
            "vectors": str(source.file) if source.file else source.pair,
            "index": result.index,
            "threads": threads,
            "encode_seconds": round(encoded - started, 1),
            "filter_seconds": round(time.perf_counter() - encoded, 1),
            "peak_memory_mib": peak_memory() >> 20,
        }
        write_json(output.with_name(f"{output.name}.report.json"), report)
    return report


def load_vectors(path: Path, rows: int) -> FloatArray:
    """Maps float32 vectors [rows, dimension] from an .npy file.

    Raises:
        CareError: If the file holds anything else.
    """
    try:
        vectors: FloatArray = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise CareError(f"{path} cannot be read as .npy: {error}") from error
    if vectors.ndim != 2 or len(vectors) != rows or vectors.dtype != np.float32:
        raise CareError(
            f"{path} holds {vectors.dtype} {list(vectors.shape)} instead of float32 [{rows}, "
            "dimension]"
        )
    return vectors


def peak_memory() -> int:
    """Returns the most memory that this process has held [bytes]."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def _read(path: Path) -> tuple[list[str], list[str]]:
    """Returns lines and, for the encoder, texts."""
    lines, texts = [], []
    for number, record in read_jsonl(path):
        lines.append(json.dumps(record, ensure_ascii=False))
        title = string(path, number, {"title": record.get("title") or ""}, "title")
        texts.append(document_text(title, string(path, number, record, "text")))
    if not lines:
        raise CareError(f"{path} holds no texts")
    return lines, texts


def _encode(
    texts: Sequence[str], kind: Kind, source: VectorSource, cache: Path, threads: int
) -> FloatArray:
    pair = load_pair(source.pair)
    spec = pair.query if kind == "queries" else pair.document
    return encode_cached(
        partial(load_encoder, spec, pair.folder, threads),
        spec,
        texts,
        cache,
        batch_size=source.batch_size,
        label=f"{source.pair} {spec.role}",
    )
