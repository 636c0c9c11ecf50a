"""A real Prometheus scrapes the real service, with the rules and settings of deploy/."""

import json
import math
import os
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from core.service_process import free_port, running_server, running_service
from core.versions import IndexFolder
from tests.deploy.rules import EXPORTED, PROMETHEUS, RECORDED, read_rules
from tests.deploy.test_dashboard import expressions, panel_expressions, read_dashboard
from tests.deploy.tools import find

pytestmark = [pytest.mark.deploy, pytest.mark.e2e]

WITHIN = 60.0


class Api:
    """The HTTP API of a Prometheus."""

    def __init__(self, address: str) -> None:
        self._address = address

    def get(self, path: str, **parameters: str) -> Any:
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self._address}/api/v1/{path}?{query}", timeout=60) as reply:
            return json.load(reply)["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Returns the series of an expression now."""
        result: list[dict[str, Any]] = self.get("query", query=expression)["result"]
        return result

    def wait_for(self, expression: str) -> list[dict[str, Any]]:
        """Repeats a query until its result is not empty."""
        end = time.monotonic() + WITHIN
        while time.monotonic() < end:
            try:
                if result := self.query(expression):
                    return result
            except OSError:
                pass  # Prometheus does not listen yet.
            time.sleep(0.2)
        raise AssertionError(f"no series for {expression}")


@pytest.fixture(scope="module")
def service(indexes: Path) -> Iterator[str]:
    with running_service(indexes, "test") as service:
        yield service.url


@pytest.fixture(scope="module")
def prometheus(service: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """Runs with prometheus.yml, but scrapes the test's service every second."""
    folder = tmp_path_factory.mktemp("prometheus")
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(PROMETHEUS / pattern) for pattern in config["rule_files"]]
    (job,) = config["scrape_configs"]
    job["static_configs"] = [{"targets": [service.removeprefix("http://")]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    command = [
        find("prometheus"),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
    ]
    with running_server(command, f"http://{address}", "/-/ready", environment=os.environ) as server:
        api = Api(server.url)
        api.wait_for('up{job="care"} == 1')
        # A rate takes two scrapes; the rules of a group may be evaluated one after the other.
        api.wait_for("route:care_http_requests:rate5m")
        yield api


def test_the_served_version_is_shown(prometheus: Api, indexes: Path) -> None:
    (series,) = prometheus.wait_for("care_index_info")
    labels = series["metric"]
    assert (labels["job"], labels["index"]) == ("care", "test")
    assert labels["version"] == IndexFolder(indexes, "test").active()


def test_a_recording_rule_has_a_value(prometheus: Api) -> None:
    (series,) = prometheus.wait_for("instance:care_queue:utilization")
    assert float(series["value"][1]) == 0


def test_every_rule_is_evaluated_without_an_error_and_no_alert_is_on(prometheus: Api) -> None:
    expected = {rule.get("alert") or rule["record"] for rule in read_rules()}
    end = time.monotonic() + WITHIN
    while time.monotonic() < end:
        rules = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
        if all(rule["health"] != "unknown" for rule in rules):
            break
        time.sleep(0.2)
    assert {rule["name"] for rule in rules} == expected
    assert {rule["health"] for rule in rules} == {"ok"}
    assert {rule["state"] for rule in rules if rule["type"] == "alerting"} == {"inactive"}


def test_no_panel_is_empty_without_traffic(prometheus: Api) -> None:
    """A panel displays finite values, or its text for no value; a rate needs two scrapes."""
    assert prometheus.wait_for("rate(care_http_requests_total[1m])")
    for panel in read_dashboard()["panels"]:
        for expression in panel_expressions(panel):
            values = [float(series["value"][1]) for series in prometheus.query(expression)]
            assert all(map(math.isfinite, values)), panel["title"]
            assert values or panel["fieldConfig"]["defaults"].get("noValue"), panel["title"]


def test_every_selector_of_rules_and_dashboard_finds_a_series(prometheus: Api) -> None:
    """A misspelt label selects nothing; every series exists before its first event."""
    asked = "\n".join([rule["expr"] for rule in read_rules()] + expressions())
    selectors = {
        name + labels for name, labels in EXPORTED.findall(asked) + RECORDED.findall(asked)
    }
    for selector in sorted(selectors):
        assert prometheus.wait_for(selector)
