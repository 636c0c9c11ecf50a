from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tqdm import tqdm

# In a log file a line every half minute is enough.
_LOG_INTERVAL = 30.0


def progress_bar(
    label: str, *, show: bool, total: int | None = None, initial: int = 0
) -> tqdm[Any]:
    """Returns a bar that counts documents: rate, time left, and a line now and then in a log."""
    # The service, which shows none, imports the stores too.
    from tqdm import tqdm

    return tqdm(
        desc=f"{label:<6}",
        total=total,
        initial=initial,
        unit=" docs",
        disable=not show,
        mininterval=0.1 if sys.stderr.isatty() else _LOG_INTERVAL,
    )
