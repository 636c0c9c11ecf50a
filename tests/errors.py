"""Assertions on errors by code and fields, independent of messages."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from core.errors import CareError


@contextmanager
def raises(
    kind: type[CareError], code: str, **fields: Any
) -> Iterator[pytest.ExceptionInfo[CareError]]:
    """Expects an error with a code and at least these fields; paths are compared as text."""
    with pytest.raises(kind) as caught:
        yield caught
    assert caught.value.code == code, str(caught.value)
    found = {name: caught.value.fields.get(name) for name in fields}
    expected = {
        name: value if isinstance(value, str | int | float | bool | list | None) else str(value)
        for name, value in fields.items()
    }
    assert found == expected, str(caught.value)


def error_code(output: str) -> str:
    """Returns the code at the end of a command's line `error: message [code]`."""
    (line,) = [line for line in output.splitlines() if line.startswith("error: ")]
    return line.rpartition("[")[2].removesuffix("]")
