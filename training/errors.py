from pathlib import Path
from typing import Any, Self

from core.errors import CareError


class TrainingError(CareError):
    """A recipe, its data or an initial checkpoint is invalid, or a run cannot continue."""

    default_code = "training_failed"

    @classmethod
    def at(cls, place: Path | str, reason: str, code: str, /, **fields: Any) -> Self:
        """Returns an error about a file (field `path`) or a key of a recipe (field `key`).

        Line breaks in the reason, which may come from a library, become spaces.
        """
        name = "path" if isinstance(place, Path) else "key"
        message = f"{place}: {' '.join(reason.split())}"
        return cls(message, code=code, **{name: place} | fields)
