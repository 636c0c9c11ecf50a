"""Series in panels and alerts: each must be exported by the service, or recorded by a rule."""

from pathlib import Path

import pytest

from service.observe.metrics import Metrics
from tests.deploy.rules import EXPORTED, PROMETHEUS, RECORDED, read_rules
from tests.deploy.tools import DEPLOY

SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
FILES = [
    *sorted(PROMETHEUS.rglob("*.yml")),
    *sorted((DEPLOY / "grafana" / "dashboards").glob("*.json")),
    DEPLOY / "kubernetes" / "base" / "autoscaling.yaml",
    DEPLOY / "kubernetes" / "prometheus-adapter-values.yaml",
]


@pytest.fixture(scope="module")
def exported() -> set[str]:
    return {
        family.name + suffix
        for family in Metrics().registry.collect()
        for suffix in SUFFIXES.get(family.type, ("",))
    }


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(DEPLOY)))
def test_every_series_that_is_named_is_exported(path: Path, exported: set[str]) -> None:
    named = {name for name, _ in EXPORTED.findall(path.read_text("utf-8"))}
    assert named or path.name == "prometheus.yml"
    assert named <= exported


def test_every_recorded_series_that_is_used_is_recorded() -> None:
    rules = read_rules()
    recorded = {rule["record"] for rule in rules if "record" in rule}
    used = {name for rule in rules for name, _ in RECORDED.findall(rule["expr"])}
    assert used
    assert used <= recorded
