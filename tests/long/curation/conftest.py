"""Data and results of the experiments, named by environment variables.

DATA, SPLIT     a BEIR folder and a split of it (data/sample, test)
QUERIES, DEPTH  questions that are sampled (200), documents of each (50)
PAIR, THREADS   the pair that searches (care-mini), threads of its encoder (1)
TEXTS           synthetic vectors of the test of scale (100,000)
RESULTS         a folder for JSON and Markdown of the results (a temporary one)
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from core.files import sha256_file
from core.provenance import library_versions
from tests.curation.conftest import data as data

SAMPLE = Path(__file__).parents[3] / "data" / "sample"


@dataclass(frozen=True)
class Settings:
    """What an experiment works on; see the module."""

    data: Path
    output: Path
    split: str = "test"
    queries: int = 200
    depth: int = 50
    pair: str = "care-mini"
    threads: int = 1
    seed: int = 0


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    variables = os.environ.get
    return Settings(
        data=Path(variables("DATA", SAMPLE)),
        output=Path(variables("RESULTS", tmp_path / "results")),
        split=variables("SPLIT", "test"),
        queries=int(variables("QUERIES", 200)),
        depth=int(variables("DEPTH", 50)),
        pair=variables("PAIR", "care-mini"),
        threads=int(variables("THREADS", 1)),
    )


def provenance(files: Iterable[Path]) -> dict[str, Any]:
    """What a result depends on: checksums of files and versions of libraries."""
    return {
        "sha256": {path.name: sha256_file(path) for path in files},
        "libraries": library_versions(),
    }
