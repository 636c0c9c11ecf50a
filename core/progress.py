"""Progress of long work on standard error: a bar on a terminal, lines in a log."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

from core.terminal import on_terminal, shown

if TYPE_CHECKING:
    from tqdm import tqdm

# Interval of progress lines in a log [s]; work that takes less has none.
_LOG_INTERVAL = 30.0


class Progress(Protocol):
    """What counts the progress of some work."""

    def update(self, n: float | None = 1, /) -> object:
        """Counts n more."""


class _Lines:
    """A file that writes each state of a bar as a line of standard error."""

    def write(self, text: str) -> None:
        if state := text.strip():
            sys.stderr.write(f"{state}\n")

    def flush(self) -> None:
        sys.stderr.flush()


def progress_bar(
    label: str,
    values: Iterable[Any] | None = None,
    *,
    unit: str = "docs",
    show: bool = True,
    total: int | None = None,
    initial: int = 0,
    delay: float = 0.0,
    leave: bool = True,
) -> tqdm[Any]:
    """Returns a progress bar, which also yields `values` if they are given.

    Without a terminal there is a line each 30 s in its place.

    Args:
        delay: Time before the bar appears [s].
    """
    # Imported here: the service imports the stores, which use this module, but shows no progress.
    from tqdm import tqdm

    options: dict[str, Any] = {"delay": delay, "leave": leave}
    if not on_terminal():
        options = {"delay": _LOG_INTERVAL, "mininterval": _LOG_INTERVAL, "file": _Lines()}
        options["position"] = 0  # without escape sequences that move between bars
    return tqdm(
        values,
        desc=f"{shown(label):<6}",
        total=total,
        initial=initial,
        unit=f" {unit}",
        disable=not show or sys.stderr is None,
        **options,
    )


def write_above(message: str) -> None:
    """Writes a line to standard error, above the bars that are shown."""
    from tqdm import tqdm

    tqdm.write(shown(message), file=sys.stderr)
