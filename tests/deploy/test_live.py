"""A real Prometheus scrapes the real service, with the rules and settings of deploy/."""

import json
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
from core.versions import current_version
from indexer.__main__ import main
from tests.conftest import make_records, write_jsonl
from tests.deploy.rules import EXPORTED, PROMETHEUS, RECORDED, read_rules
from tests.deploy.test_dashboard import expressions
from tests.deploy.tools import find

pytestmark = [pytest.mark.deploy, pytest.mark.e2e]

WITHIN = 30.0


class Api:
    """The HTTP API of a Prometheus."""

    def __init__(self, address: str) -> None:
        self._address = address

    def get(self, path: str, **parameters: str) -> Any:
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self._address}/api/v1/{path}?{query}", timeout=10) as reply:
            return json.load(reply)["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series that an expression gives now."""
        result: list[dict[str, Any]] = self.get("query", query=expression)["result"]
        return result

    def wait_for(self, expression: str) -> list[dict[str, Any]]:
        """Asks until there is an answer."""
        end = time.monotonic() + WITHIN
        while time.monotonic() < end:
            try:
                if result := self.query(expression):
                    return result
            except OSError:
                pass  # it does not listen yet
            time.sleep(0.2)
        raise AssertionError(f"no answer to {expression}")


@pytest.fixture(scope="module")
def indexes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("live")
    corpus = write_jsonl(folder / "corpus.jsonl", make_records(8))
    arguments = ["build", "--corpus", str(corpus), "--index", "test"]
    folders = ["--indexes", str(folder / "indexes"), "--builds", str(folder / "builds")]
    assert main([*arguments, *folders]) == 0
    return folder / "indexes"


@pytest.fixture(scope="module")
def service(indexes: Path) -> Iterator[str]:
    with running_service(indexes, "test") as service:
        yield service.url


@pytest.fixture(scope="module")
def prometheus(service: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """Started with prometheus.yml, but for the address, and asking every second."""
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
    assert labels["version"] == current_version(indexes, "test")


def test_a_recording_rule_answers(prometheus: Api) -> None:
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


def test_every_selector_of_rules_and_dashboard_finds_a_series(prometheus: Api) -> None:
    """A label that is misspelt finds nothing; each series is there before its first event."""
    asked = "\n".join([rule["expr"] for rule in read_rules()] + expressions())
    selectors = {
        name + labels for name, labels in EXPORTED.findall(asked) + RECORDED.findall(asked)
    }
    for selector in sorted(selectors):
        assert prometheus.wait_for(selector)
