import logging
import time
from collections.abc import Callable
from enum import IntEnum

from core.errors import CareError

_LOG = logging.getLogger("care")


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

    Each call that `allows` admits gets a permit; pass it to `succeeded`, `failed` or `abandoned`
    once. A call that began before the breaker last opened or closed changes nothing when it ends.

    The log has one line when the breaker opens, and one when it closes again.

    Args:
        server: What the calls ask, for the log; the log of the breaker stays empty without it.
        failures: Consecutive failures that open the breaker.
        retry_after: Time until an open breaker admits one call, the probe [s].
        clock: Monotonic time [s].
    """

    def __init__(
        self,
        server: str = "",
        failures: int = 3,
        retry_after: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._server = server
        self._failures = failures
        self._retry_after = retry_after
        self._clock = clock
        self.state = BreakerState.CLOSED
        self._failed = 0
        self._retry_at = 0.0
        # The number of the current permits: those of earlier ones are stale.
        self._permit = 1

    def allows(self) -> int:
        """Returns a permit for a call, or 0; in an open breaker the first one is the probe."""
        if self.state is BreakerState.OPEN and self._clock() >= self._retry_at:
            self._change(BreakerState.HALF_OPEN)
            return self._permit
        return self._permit if self.state is BreakerState.CLOSED else 0

    def succeeded(self, permit: int) -> None:
        """Closes the breaker."""
        if permit != self._permit:
            return
        self._failed = 0
        if self.state is BreakerState.HALF_OPEN:
            self._change(BreakerState.CLOSED)
            self._log(logging.INFO, "circuit breaker of %s closed: calls succeed again")

    def failed(self, permit: int) -> None:
        """Counts a failure. Opens the breaker after too many, or if the probe failed."""
        if permit != self._permit:
            return
        self._failed += 1
        was = self.state
        if was is BreakerState.HALF_OPEN or self._failed >= self._failures:
            self._change(BreakerState.OPEN)
            self._retry_at = self._clock() + self._retry_after
            if was is BreakerState.CLOSED:
                self._log(logging.WARNING, "circuit breaker of %s open: calls fail at once")

    def abandoned(self, permit: int) -> None:
        """Cancels a call without a result; if it was the probe, the next call is the probe."""
        if permit == self._permit and self.state is BreakerState.HALF_OPEN:
            self._change(BreakerState.OPEN)

    def _change(self, state: BreakerState) -> None:
        self.state = state
        self._permit += 1

    def _log(self, level: int, message: str) -> None:
        if self._server:
            _LOG.log(level, message, self._server)
