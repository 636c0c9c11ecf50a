"""Settings of the experiments, from environment variables.

DATA, SPLIT     a BEIR folder and a split of it (data/sample, test)
QUERIES, DEPTH  number of sampled questions (200) and of documents per question (50)
PAIR, THREADS   the pair that searches (care-mini) and its encoder's threads (1)
TEXTS           number of synthetic vectors in the test of scale (100,000)
RESULTS         output folder for JSON and Markdown (a temporary folder)
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
    """Settings of an experiment; see the module's docstring."""

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
    """Returns what a result depends on: checksums of files and versions of libraries."""
    return {
        "sha256": {path.name: sha256_file(path) for path in files},
        "libraries": library_versions(),
    }
