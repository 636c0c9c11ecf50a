"""Locust users that send requests like applications of retrieval-augmented generation.

Locust exits with status 1 if the budget is missed: fewer successful requests per second than
`--min-rate`, or a larger share of failed requests than `--max-error-rate`. Every status except
2xx counts as a failure, including 429.

If the service needs an API key, set the variable `CARE_LOAD_KEY`.
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
    """Adds options for the traffic and the budget to Locust."""
    group = parser.add_argument_group("Care", "Traffic and budget of a retrieval service")
    Mix.add_options(group)
    add = group.add_argument
    add("--min-rate", type=float, default=0, help="minimum of successful requests per second")
    add("--max-error-rate", type=float, default=0.001, help="maximum share of failed requests")


@events.init.add_listener  # type: ignore[untyped-decorator]
def create_traffic(environment: Any, **_: Any) -> None:
    """Creates one traffic for all users, so that a new question is not sent twice."""
    options = environment.parsed_options
    texts, seed = read_texts(options.queries), random.randrange(2**32)
    RagApplication.traffic = Traffic(texts, seed, Mix.of(options))


@events.quitting.add_listener  # type: ignore[untyped-decorator]
def check_budget(environment: Any, **_: Any) -> None:
    """Sets the exit status by comparing the results with the budget."""
    if isinstance(environment.runner, WorkerRunner):
        return
    options, total = environment.parsed_options, environment.stats.total
    seconds = (total.last_request_timestamp or 0) - total.start_time
    good = total.num_requests - total.num_failures
    rate = good / seconds if seconds > 0 else 0.0
    missed = {}
    if not total.num_requests:
        missed["no_request"] = "no request was sent"
    if rate < options.min_rate:
        bound = f"--min-rate is {options.min_rate:g}"
        missed["low_rate"] = f"{rate:.1f} successful requests/s; {bound}"
    if total.fail_ratio > options.max_error_rate:
        bound = f"--max-error-rate is {options.max_error_rate:.3%}"
        missed["high_error_rate"] = f"{total.fail_ratio:.3%} of requests failed; {bound}"
    if environment.runner.exceptions:
        missed["user_failed"] = "a Locust user raised an exception; see the log above"
    for code, reason in missed.items():
        logger.error("error: budget missed: %s [%s]", reason, code)
    environment.process_exit_code = 1 if missed else 0


class RagApplication(FastHttpUser):
    """Sends the next request as soon as the last response has arrived."""

    wait_time = constant(0)
    traffic: Traffic

    def on_start(self) -> None:
        """Reads the departments to filter by from the service."""
        key = os.environ.get("CARE_LOAD_KEY")
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        index = self.client.get("/index", headers=self.headers, name="/index").json()
        self.traffic.departments = departments_of(index)

    @task
    def search(self) -> None:
        name, path, body = self.traffic.draw()
        self.client.post(path, json=body, headers=self.headers, name=name)
