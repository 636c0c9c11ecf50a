import re

import pytest

from tests.deploy.rules import (
    PROMETHEUS,
    RECORDED,
    RULE_FILES,
    TEST_FILES,
    read_alerts,
    read_rules,
    read_unit_tests,
)
from tests.deploy.tools import ROOT, run

ALERTS = read_alerts()


@pytest.mark.deploy
def test_promtool_accepts_the_configuration_and_its_rules() -> None:
    output = run("promtool", "check", "config", PROMETHEUS / "prometheus.yml")
    assert f"{len(RULE_FILES)} rule files found" in output
    assert "duplicate" not in run("promtool", "check", "rules", *RULE_FILES)


@pytest.mark.deploy
def test_the_rules_pass_their_unit_tests() -> None:
    run("promtool", "test", "rules", *TEST_FILES)


def test_every_alert_is_seen_to_fire_and_to_be_quiet() -> None:
    cases = [case for test in read_unit_tests() for case in test.get("alert_rule_test", ())]
    firing = {case["alertname"] for case in cases if case.get("exp_alerts")}
    quiet = {case["alertname"] for case in cases if not case.get("exp_alerts")}
    assert firing == set(ALERTS)
    assert quiet == set(ALERTS)


def test_every_recorded_series_has_a_unit_test() -> None:
    recorded = {rule["record"] for rule in read_rules() if "record" in rule}
    tests = "".join(path.read_text() for path in TEST_FILES)
    assert recorded == {name for name, _ in RECORDED.findall(tests)}


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_says_how_grave_it_is_what_is_wrong_and_where_help_is(name: str) -> None:
    alert = ALERTS[name]
    assert alert["labels"]["severity"] in ("critical", "warning")
    assert alert["annotations"]["summary"].endswith(".")
    assert alert["annotations"]["runbook_url"] == f"docs/runbook.md#{name.lower()}"


def test_the_runbook_has_a_section_for_each_alert_and_for_no_other() -> None:
    runbook = (ROOT / "docs" / "runbook.md").read_text("utf-8")
    sections = re.findall(r"^## (\w+)\n\n\*(\w+)\.\*", runbook, re.M)
    assert dict(sections) == {name: alert["labels"]["severity"] for name, alert in ALERTS.items()}


def test_the_links_of_the_runbook_lead_somewhere() -> None:
    runbook = (ROOT / "docs" / "runbook.md").read_text("utf-8")
    for path, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", runbook):
        target = ROOT / "docs" / (path or "runbook.md")
        assert target.exists(), path
        headings = re.findall(r"^#+ (.*)$", target.read_text("utf-8"), re.M)
        assert not anchor or anchor in {h.lower().replace(" ", "-") for h in headings}, anchor
