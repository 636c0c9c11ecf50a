from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tqdm import tqdm

# Interval of progress lines in a log file [s].
_LOG_INTERVAL = 30.0


def progress_bar(
    label: str, *, show: bool, total: int | None = None, initial: int = 0
) -> tqdm[Any]:
    """Returns a progress bar that counts documents; without a terminal it updates every 30 s."""
    # Imported here: the service imports the stores, which use this module, but shows no progress.
    from tqdm import tqdm

    return tqdm(
        desc=f"{label:<6}",
        total=total,
        initial=initial,
        unit=" docs",
        disable=not show,
        mininterval=0.1 if sys.stderr.isatty() else _LOG_INTERVAL,
    )
