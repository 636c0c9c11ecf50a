"""Files of a run: their names, and what failed at which place."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from core.files import writing_in
from training.errors import TrainingError

# In the folder of a stage.
RESULT, METRICS, CURVES, TRIPLES = "result.json", "metrics.json", "curves.png", "triples.jsonl"
# In the folder of a stage and of a run.
PAIR, RECIPE = "pair.toml", "recipe.yaml"


def read_json(path: Path) -> Any:
    """Returns the value of a JSON file that this package has written, or a library."""
    return json.loads(path.read_text(encoding="utf-8"))


def checksum(value: Any) -> str:
    """Returns the SHA-256 of a value of JSON; the order of keys is no part of it."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Raises a CareError that names the place where the disk failed, also for weights.

    Their error is no OSError.
    """
    # No recipe needs it to be checked.
    from safetensors import SafetensorError

    try:
        with writing_in(folder):
            yield
    except SafetensorError as error:
        raise TrainingError.at(folder, str(error), "input_output") from error
