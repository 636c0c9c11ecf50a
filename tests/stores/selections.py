"""Selections of rows."""

from core.filters import Selection
from core.types import RowArray


def only(rows: RowArray | None) -> Selection | None:
    """Returns what selects rows, int64 [n], ascending; None for all."""
    return None if rows is None else Selection.of_rows(rows)
