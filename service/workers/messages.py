"""What a supervisor and its workers say to each other, as pickled tuples over a pair of sockets."""

from dataclasses import dataclass
from pathlib import Path


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
    """To the supervisor: load the active version of an index, by default of the default one.

    With a number, none is loaded where the version with this number or a later one is served.
    """

    request: int
    index: str = ""
    number: int | None = None


@dataclass(frozen=True, slots=True)
class Reloaded:
    """To a worker: all serve the active version that it asked for, or why not."""

    request: int
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """To a worker: load the active version of an index, if it is open and not the default one."""

    request: int
    index: str
    number: int | None = None


@dataclass(frozen=True, slots=True)
class Loaded:
    """To the supervisor: that is done, or why not."""

    request: int
    error: Exception | None = None


ToWorker = Load | Prepare | Activate | Abort | Reloaded
ToSupervisor = Loaded | Started | Prepared | Activated | Serving | Failed | Reload
