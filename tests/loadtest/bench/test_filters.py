import json
from pathlib import Path

from loadtest.bench.filters import run
from loadtest.bench.options import FilterBenchOptions


def test_each_number_of_values_is_measured(tmp_path: Path) -> None:
    run(FilterBenchOptions(rows=200, fields=2, distinct=[3, 50], cache=tmp_path, out=tmp_path))
    found = json.loads((tmp_path / "filters-200.json").read_text("utf-8"))
    assert [figure["unit"] for figure in found["figures"]] == ["ms", "ms"]
    assert all(figure["reached"] > 0 for figure in found["figures"])
    assert "filters-200.json" in (tmp_path / "README.md").read_text("utf-8")
