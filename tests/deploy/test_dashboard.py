import json
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.tools import DEPLOY, run

GRAFANA = DEPLOY / "grafana"


def read_dashboard() -> dict[str, Any]:
    dashboard: dict[str, Any] = json.loads(
        (GRAFANA / "dashboards" / "care.json").read_text("utf-8")
    )
    return dashboard


def panel_expressions(panel: dict[str, Any]) -> list[str]:
    """The expressions of a panel, with Grafana's variables replaced."""
    return [
        target["expr"].replace("$__rate_interval", "1m").replace("$instance", ".*")
        for target in panel.get("targets", ())
    ]


def expressions() -> list[str]:
    """The expressions of all panels."""
    return [expr for panel in read_dashboard()["panels"] for expr in panel_expressions(panel)]


@pytest.mark.deploy
def test_promtool_accepts_the_expression_of_every_panel(tmp_path: Path) -> None:
    rules = [{"record": f"panel:{i}", "expr": expr} for i, expr in enumerate(expressions())]
    assert rules
    path = tmp_path / "panels.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    run("promtool", "check", "rules", path)


def test_every_panel_and_query_uses_the_chosen_data_source() -> None:
    for panel in read_dashboard()["panels"]:
        if panel["type"] != "row":
            sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
            assert {source["uid"] for source in sources} == {"${datasource}"}, panel["title"]


def test_panels_have_unique_ids_and_do_not_overlap() -> None:
    panels = read_dashboard()["panels"]
    assert max(Counter(panel["id"] for panel in panels).values()) == 1
    cells: Counter[tuple[int, int]] = Counter()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        columns = range(place["x"], place["x"] + place["w"])
        cells.update(product(columns, range(place["y"], place["y"] + place["h"])))
    assert max(cells.values()) == 1
