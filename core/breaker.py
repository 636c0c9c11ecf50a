import time
from collections.abc import Callable
from enum import IntEnum

from core.errors import CareError


class UnavailableError(CareError):
    """A call failed, came too late, or was not made because the breaker is open."""

    default_code = "unavailable"

    def __init__(self, message: str = "a server that this needs does not answer: retry") -> None:
        super().__init__(message)


class BreakerState(IntEnum):
    """Closed: calls go through; half open: the probe is on its way; open: none does.

    The numbers are those of the metric.
    """

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


class Breaker:
    """Stops calls to what keeps failing, and tries again with one call at a time.

    Each call that `allows` lets through ends with one of `succeeded`, `failed` and `abandoned`.

    Args:
        failures: Failures in a row after which no call goes through.
        retry_after: Time until one call, the probe, may try again [s].
        clock: Monotonic time [s].
    """

    def __init__(
        self,
        failures: int = 3,
        retry_after: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._failures = failures
        self._retry_after = retry_after
        self._clock = clock
        self.state = BreakerState.CLOSED
        self._failed = 0
        self._retry_at = 0.0

    def allows(self) -> bool:
        """Returns whether a call may go through now; the first one in an open breaker probes."""
        if self.state is BreakerState.OPEN and self._clock() >= self._retry_at:
            self.state = BreakerState.HALF_OPEN
            return True
        return self.state is BreakerState.CLOSED

    def succeeded(self) -> None:
        """Closes the breaker."""
        self.state = BreakerState.CLOSED
        self._failed = 0

    def failed(self) -> None:
        """Counts a failure, which may open the breaker; a failed probe opens it again."""
        self._failed += 1
        if self.state is BreakerState.HALF_OPEN or (
            self.state is BreakerState.CLOSED and self._failed >= self._failures
        ):
            self.state = BreakerState.OPEN
            self._retry_at = self._clock() + self._retry_after

    def abandoned(self) -> None:
        """Takes back a call that told nothing; if it was the probe, the next call is."""
        if self.state is BreakerState.HALF_OPEN:
            self.state = BreakerState.OPEN
