"""File names of a run, and reading and writing of its files."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from core.files import read_small, writing_in
from core.records import parse_json
from models.pairs import PAIR as PAIR
from training.errors import TrainingError

# Files of a stage's folder.
RESULT, METRICS, CURVES, TRIPLES = "result.json", "metrics.json", "curves.png", "triples.jsonl"
# Files of a stage's folder and of a run's folder.
RECIPE, TOKENS = "recipe.yaml", "tokens.safetensors"


def read_json(path: Path) -> Any:
    """Returns the value of a JSON file written by this package or a library."""
    return parse_json(read_small(path))


def checksum(value: Any) -> str:
    """Returns the SHA-256 of a JSON value; the order of keys does not matter."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Converts input and output errors of the block into a CareError that names the place.

    safetensors raises SafetensorError, which is not an OSError, if weights cannot be written.
    """
    # Imported here: recipes are checked without safetensors.
    from safetensors import SafetensorError

    try:
        with writing_in(folder):
            yield
    except SafetensorError as error:
        raise TrainingError.at(folder, str(error), "input_output") from error
