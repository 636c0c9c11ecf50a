import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from functools import partial
from threading import Lock

from core.errors import CareError

_LOG = logging.getLogger("care")
# Least time between two lines about single failures [s].
_LINE_EVERY = 60.0


def _type(error: Exception) -> str:
    return type(error).__name__


class UnavailableError(CareError):
    """A call failed, timed out, or was not made because the circuit breaker is open."""

    default_code = "unavailable"

    def __init__(self, message: str = "a required server does not respond: retry later") -> None:
        super().__init__(message)


class BreakerState(IntEnum):
    """States of a circuit breaker; the values are exported as a metric."""

    CLOSED = 0  # calls are allowed
    HALF_OPEN = 1  # one probe call is running; all others are rejected
    OPEN = 2  # all calls are rejected


class Breaker:
    """Circuit breaker: rejects calls to a failing server and retries with one call at a time.

    Threads may share it. A call that began before it last opened or closed changes nothing when it
    ends.

    The log has one line with the reason when the breaker opens, and one when it closes again. Of
    failures that do not open it the log has one line a minute at most.

    Args:
        server: What the calls ask, for the log; nothing is logged without it.
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
        self._lock = Lock()
        self.state = BreakerState.CLOSED
        self._failed = 0
        self._retry_at = 0.0
        self._line_at = -math.inf
        # The number of the current permits: those of earlier ones are stale.
        self._permit = 1

    @contextmanager
    def call(
        self,
        *failures: type[Exception],
        answers: tuple[type[Exception], ...] = (),
        reason: Callable[[Exception], str] = _type,
    ) -> Iterator[None]:
        """Makes a call in the block, which may await.

        A block that ends closes the breaker. Other exceptions than these, such as cancellation,
        say nothing of the server; after a probe without a result, the next call is the probe.

        Args:
            failures: Exceptions of a failed call. Too many in a row, or one of the probe, open the
                breaker.
            answers: Those among them with which a working server responds; they close it.
            reason: What the log says of a failure: no query, address or secret.

        Raises:
            UnavailableError: If the breaker is open.
        """
        with self._lock:
            permit = self._admit()
        if not permit:
            raise UnavailableError
        end = self._abandon
        try:
            yield
            end = self._succeed
        except answers:
            end = self._succeed
            raise
        except failures as error:
            end = partial(self._fail, reason(error))
            raise
        finally:
            with self._lock:
                if permit == self._permit:
                    end()

    def _admit(self) -> int:
        """Returns a permit for a call, or 0; in an open breaker the first one is the probe."""
        if self.state is BreakerState.OPEN and self._clock() >= self._retry_at:
            self._change(BreakerState.HALF_OPEN)
            return self._permit
        return self._permit if self.state is BreakerState.CLOSED else 0

    def _succeed(self) -> None:
        self._failed = 0
        if self.state is BreakerState.HALF_OPEN:
            self._change(BreakerState.CLOSED)
            self._log(logging.INFO, "circuit breaker of %s closed: calls succeed again")

    def _fail(self, reason: str) -> None:
        self._failed += 1
        was = self.state
        if was is BreakerState.HALF_OPEN or self._failed >= self._failures:
            self._change(BreakerState.OPEN)
            self._retry_at = self._clock() + self._retry_after
            if was is BreakerState.CLOSED:
                message = "circuit breaker of %s open: calls fail at once"
                self._log(logging.WARNING, message, reason=reason)
        elif self._clock() >= self._line_at + _LINE_EVERY:
            self._line_at = self._clock()
            self._log(logging.WARNING, "a call of %s failed", reason=reason)

    def _abandon(self) -> None:
        if self.state is BreakerState.HALF_OPEN:
            self._change(BreakerState.OPEN)

    def _change(self, state: BreakerState) -> None:
        self.state = state
        self._permit += 1

    def _log(self, level: int, message: str, **fields: str) -> None:
        if self._server:
            _LOG.log(level, message, self._server, extra={"fields": fields})
