import time
from collections.abc import Callable
from enum import IntEnum

from core.errors import CareError


class UnavailableError(CareError):
    """A call failed, timed out, or was not made because the circuit breaker is open."""

    default_code = "unavailable"

    def __init__(self, message: str = "a required server does not respond: retry later") -> None:
        super().__init__(message)


class BreakerState(IntEnum):
    """States of a circuit breaker; the values are exported as a metric.

    Attributes:
        CLOSED: Calls are allowed.
        HALF_OPEN: One probe call is running; all others are rejected.
        OPEN: All calls are rejected.
    """

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


class Breaker:
    """Circuit breaker: rejects calls to a failing server and retries with one call at a time.

    After each call that `allows` admits, call `succeeded`, `failed` or `abandoned` once.

    Args:
        failures: Consecutive failures that open the breaker.
        retry_after: Time until an open breaker admits one call, the probe [s].
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
        """Returns whether a call may be made; in an open breaker the first one is the probe."""
        if self.state is BreakerState.OPEN and self._clock() >= self._retry_at:
            self.state = BreakerState.HALF_OPEN
            return True
        return self.state is BreakerState.CLOSED

    def succeeded(self) -> None:
        """Closes the breaker."""
        self.state = BreakerState.CLOSED
        self._failed = 0

    def failed(self) -> None:
        """Counts a failure. Opens the breaker after too many, or if the probe failed."""
        self._failed += 1
        if self.state is BreakerState.HALF_OPEN or (
            self.state is BreakerState.CLOSED and self._failed >= self._failures
        ):
            self.state = BreakerState.OPEN
            self._retry_at = self._clock() + self._retry_after

    def abandoned(self) -> None:
        """Cancels a call without a result; if it was the probe, the next call is the probe."""
        if self.state is BreakerState.HALF_OPEN:
            self.state = BreakerState.OPEN
