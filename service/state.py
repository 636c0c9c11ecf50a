from dataclasses import dataclass

from service.api_keys import ApiKeys
from service.engine import Engine
from service.metrics import Metrics
from service.rate_limit import RateLimiter
from service.settings import Settings


@dataclass(frozen=True, slots=True)
class State:
    """What routes work with; one for each application."""

    settings: Settings
    metrics: Metrics
    engine: Engine
    keys: ApiKeys
    limiter: RateLimiter | None
