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
from tests.deploy.test_dashboard import read_dashboard
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


def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not() -> None:
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
def test_an_alert_has_a_severity_a_summary_its_threshold_and_a_runbook(name: str) -> None:
    alert = ALERTS[name]
    description = alert["annotations"]["description"]
    assert description.startswith("Threshold: ")
    assert description.endswith(
        f" Set it in {(PROMETHEUS / 'rules' / 'alerts.yml').relative_to(ROOT)}."
    )
    # 86400 is a day in seconds, 0 a state; the other numbers of the expression are the threshold.
    expression = re.sub(r"\w*\{.*?\}|\[\w+\]|\w+:\w+:\w+|\* 86400|6 \* 3600", "", alert["expr"])
    for number in set(re.findall(r"\b\d+(?:\.\d+)?\b", expression)) - {"0", "1"}:
        assert number in description, (name, number)
    assert alert["labels"]["severity"] in ("critical", "warning")
    assert alert["annotations"]["summary"].endswith(".")
    assert alert["annotations"]["runbook_url"] == f"docs/runbook.md#{name.lower()}"


def test_the_runbook_has_a_section_for_each_alert_and_for_no_other() -> None:
    runbook = (ROOT / "docs" / "runbook.md").read_text("utf-8")
    sections = re.findall(r"^## (\w+)\n\n\*(\w+)\.\*", runbook, re.M)
    assert dict(sections) == {name: alert["labels"]["severity"] for name, alert in ALERTS.items()}


def test_the_panels_that_the_runbook_names_exist() -> None:
    runbook = (ROOT / "docs" / "runbook.md").read_text("utf-8")
    named = set(re.findall(r"[Pp]anel \*([^*]+)\*", runbook))
    assert named
    assert named <= {panel["title"] for panel in read_dashboard()["panels"]}


def test_the_links_of_the_runbook_exist() -> None:
    runbook = (ROOT / "docs" / "runbook.md").read_text("utf-8")
    for path, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", runbook):
        target = ROOT / "docs" / (path or "runbook.md")
        assert target.exists(), path
        headings = re.findall(r"^#+ (.*)$", target.read_text("utf-8"), re.M)
        assert not anchor or anchor in {h.lower().replace(" ", "-") for h in headings}, anchor
