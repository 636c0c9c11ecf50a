"""Locust users that ask as applications of retrieval-augmented generation do.

Locust's exit status is 1 if the budget is missed: fewer successful requests per second than
`--min-rate`, or a larger share of failed requests than `--max-error-rate`. Every status but 2xx
is a failure, also 429, whatever its Retry-After says.

`CARE_LOAD_KEY` holds the API key, if one is needed.
"""

import logging
import os
import random
from argparse import ArgumentParser
from typing import Any

from locust import FastHttpUser, constant, events, task
from locust.runners import WorkerRunner

from loadtest.traffic import Mix, Traffic, departments_of, read_texts

logger = logging.getLogger(__name__)


@events.init_command_line_parser.add_listener  # type: ignore[untyped-decorator]
def add_options(parser: ArgumentParser, **_: Any) -> None:
    """Adds the budget and the traffic's shares to Locust's options."""
    group = parser.add_argument_group("Care", "Traffic and budget of a retrieval service")
    Mix.add_options(group)
    add = group.add_argument
    add("--min-rate", type=float, default=0, help="least successful requests per second")
    add("--max-error-rate", type=float, default=0.001, help="most failed requests, as a share")


@events.init.add_listener  # type: ignore[untyped-decorator]
def share_traffic(environment: Any, **_: Any) -> None:
    """Reads the questions once; all users draw from them, so no two ask the same new one."""
    options = environment.parsed_options
    texts, seed = read_texts(options.queries), random.randrange(2**32)
    RagApplication.traffic = Traffic(texts, seed, Mix.of(options))


@events.quitting.add_listener  # type: ignore[untyped-decorator]
def judge(environment: Any, **_: Any) -> None:
    """Sets the exit status from the budget."""
    if isinstance(environment.runner, WorkerRunner):
        return
    options, total = environment.parsed_options, environment.stats.total
    seconds = (total.last_request_timestamp or 0) - total.start_time
    good = total.num_requests - total.num_failures
    rate = good / seconds if seconds > 0 else 0.0
    missed = {}
    if not total.num_requests:
        missed["no_request"] = "no request was made"
    if rate < options.min_rate:
        wanted = f"at least {options.min_rate:g} wanted"
        missed["low_rate"] = f"{rate:.1f} requests/s succeeded, {wanted}"
    if total.fail_ratio > options.max_error_rate:
        allowed = f"at most {options.max_error_rate:.3%} allowed"
        missed["high_error_rate"] = f"{total.fail_ratio:.3%} of requests failed, {allowed}"
    if environment.runner.exceptions:
        missed["user_failed"] = "a user raised an exception"
    for code, reason in missed.items():
        logger.error("error: budget missed: %s [%s]", reason, code)
    environment.process_exit_code = 1 if missed else 0


class RagApplication(FastHttpUser):
    """Asks the next question as soon as the last one is answered."""

    wait_time = constant(0)
    traffic: Traffic

    def on_start(self) -> None:
        """Reads the departments that searches can be filtered by."""
        key = os.environ.get("CARE_LOAD_KEY")
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        index = self.client.get("/index", headers=self.headers, name="/index").json()
        self.traffic.departments = departments_of(index)

    @task
    def ask(self) -> None:
        """One request."""
        name, path, body = self.traffic.draw()
        self.client.post(path, json=body, headers=self.headers, name=name)
