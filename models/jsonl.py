"""JSONL as training, evaluation and curation read it."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from core.errors import CareError


def read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields line numbers, from 1, and records; empty lines are passed over.

    Raises:
        CareError: If the file cannot be read or a line is no JSON object.
    """
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                record = json.loads(line)
                if not isinstance(record, dict):
                    raise CareError(f"{path} line {number} is no JSON object")
                yield number, record
    except OSError as error:
        raise CareError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CareError(f"{path} is not UTF-8") from error
    except json.JSONDecodeError as error:
        raise CareError(f"{path} line {number} is not valid JSON") from error


def string(path: Path, number: int, record: Mapping[str, Any], name: str) -> str:
    """Returns a field of a record, on line `number` of `path`, that must be a string.

    Raises:
        CareError: If it is missing or no string.
    """
    value = record.get(name)
    if not isinstance(value, str):
        raise CareError(f"{path} line {number}: {name} is missing or no string")
    return value
