"""What a supervisor and its workers say to each other, as pickled tuples over a pair of sockets."""

from dataclasses import dataclass
from pathlib import Path

from core.errors import CareError, IndexVersionError


@dataclass(frozen=True, slots=True)
class Prepare:
    """To a worker: open the version in a folder, whose files are verified."""

    folder: Path


@dataclass(frozen=True, slots=True)
class Prepared:
    """To the supervisor: the version is open, or why it is not."""

    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Activate:
    """To a worker: serve the version that is open."""


@dataclass(frozen=True, slots=True)
class Activated:
    """To the supervisor: the version is served."""


@dataclass(frozen=True, slots=True)
class Abort:
    """To a worker: close the version that is open, if one is."""


@dataclass(frozen=True, slots=True)
class Started:
    """To the supervisor: the worker has loaded all but a version."""


@dataclass(frozen=True, slots=True)
class Serving:
    """To the supervisor: the worker accepts connections; the address, as a URL."""

    url: str


@dataclass(frozen=True, slots=True)
class Failed:
    """To the supervisor: why the worker ends before it serves."""

    error: Exception


@dataclass(frozen=True, slots=True)
class Reload:
    """To the supervisor: load the active version."""

    request: int


@dataclass(frozen=True, slots=True)
class Reloaded:
    """To a worker: the active version is served by all, or why not."""

    request: int
    error: Exception | None = None


ToWorker = Prepare | Activate | Abort | Reloaded
ToSupervisor = Started | Prepared | Activated | Serving | Failed | Reload


def sendable(error: Exception) -> Exception:
    """Returns an error that the other process can show; of an unexpected one, only its kind."""
    if isinstance(error, CareError):
        return error
    return IndexVersionError(f"an unexpected error: {type(error).__name__}", code="internal_error")
