from pathlib import Path
from typing import Any, Self

from core.errors import CareError


class TrainingError(CareError):
    """A recipe, its data or its initial checkpoints are wrong, or a run cannot continue."""

    default_code = "training_failed"

    @classmethod
    def at(cls, place: Path | str, reason: str, code: str, /, **fields: Any) -> Self:
        """Returns the error of a file or of a recipe's key, with the field `path` or `key`.

        The reason may be a library's own, of several lines; they become one.
        """
        name = "path" if isinstance(place, Path) else "key"
        message = f"{place}: {' '.join(reason.split())}"
        return cls(message, code=code, **{name: place} | fields)
