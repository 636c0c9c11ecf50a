"""What a check found."""

from dataclasses import dataclass
from typing import Literal, Self

from core.errors import CareError

Status = Literal["ok", "optional", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    check: str  # what was checked, in one word or two
    # "error" if a command or the service would fail, "warning" if it would be slow or lack a part,
    # "optional" if something is not installed that only some commands need.
    status: Status
    message: str  # what was found
    advice: str = ""  # what to do, or ""

    @classmethod
    def of(cls, check: str, error: CareError) -> Self:
        """Returns an error with its code; the message says what to do."""
        return cls(check, "error", f"{error} [{error.code}]")
