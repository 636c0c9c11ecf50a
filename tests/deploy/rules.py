"""The rules of Prometheus, read from their files."""

import re
from typing import Any

import yaml

from tests.deploy.tools import DEPLOY

PROMETHEUS = DEPLOY / "prometheus"
RULE_FILES = sorted((PROMETHEUS / "rules").glob("*.yml"))
TEST_FILES = sorted((PROMETHEUS / "tests").glob("*.yml"))

# A series of the service's own, and one that a rule records, each with its matchers.
EXPORTED = re.compile(r"(?<![\w:])((?:care|process)_[a-z_]+)(\{[^}]*\})?")
RECORDED = re.compile(r"\b([a-z]+:care_[a-z_]+:[a-z0-9_]+)(\{[^}]*\})?")


def read_rules() -> list[dict[str, Any]]:
    groups = (group for path in RULE_FILES for group in yaml.safe_load(path.read_text())["groups"])
    return [rule for group in groups for rule in group["rules"]]


def read_alerts() -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for rule in read_rules() if "alert" in rule}


def read_unit_tests() -> list[dict[str, Any]]:
    return [test for path in TEST_FILES for test in yaml.safe_load(path.read_text())["tests"]]
