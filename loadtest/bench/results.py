"""Runs scenarios; writes metrics with goals, the machine, and the tables of all results."""

import json
import platform
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, Literal

from jinja2 import Environment

from core.errors import CareError
from core.provenance import commit, hardware
from core.records import write_json
from core.terminal import shown, shown_lines
from loadtest.bench.options import ServiceOptions

BENCH_NAME, PEERS_NAME, TABLE_NAME = "bench.json", "peers.json", "README.md"

# Takes the options; returns its `figures` (metrics with goals) and raw results.
Scenario = Callable[[ServiceOptions], dict[str, Any]]

_LIST = (
    "import json; from importlib.metadata import distributions; "
    "print(json.dumps([(d.name, d.version) for d in distributions()]))"
)
_LIBRARIES = (
    *("torch", "transformers", "sentence-transformers", "infinity-emb", "optimum", "optimum-onnx"),
    *("onnxruntime", "tokenizers", "faiss-cpu", "numpy", "pyarrow", "fastapi", "starlette"),
    *("uvicorn", "uvloop", "httptools", "pydantic", "psutil"),
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


def measure(
    known: Mapping[str, Scenario],
    options: ServiceOptions,
    name: str = BENCH_NAME,
    pythons: Sequence[Path] = (),
) -> None:
    """Runs the chosen scenarios one after another and writes the results after each.

    If a scenario fails, its error is written instead of its results and the next one runs.

    Args:
        known: Scenarios by their names in `--only`.
        options: Options of all scenarios.
        name: Name of the file of results.
        pythons: The Pythons of peers' environments.
    """
    chosen = options.only.split(",") if options.only else list(known)
    if unknown := [each for each in chosen if each not in known]:
        message = f"unknown scenario {', '.join(unknown)}: choose from {', '.join(known)}"
        raise CareError(message, code="unknown_scenario", scenarios=unknown)
    # Absolute paths say nothing on another machine.
    paths = {key: Path(value).name for key, value in asdict(options).items() if _absolute(value)}
    result: dict[str, Any] = {
        "environment": describe(pythons),
        "options": json.loads(json.dumps(asdict(options) | paths, default=str)),
        "scenarios": {},
    }
    for scenario in chosen:
        started = time.monotonic()
        print(f"{scenario} …", flush=True)
        try:
            found = known[scenario](options)
        except CareError as error:
            found = {"error": str(error), "code": error.code}
        except Exception:
            # An unexpected error of one scenario must not lose the results of the others.
            found = {"error": traceback.format_exc(), "code": "unexpected_error"}
        found["seconds"] = round(time.monotonic() - started, 1)
        result["scenarios"][scenario] = found
        for each in found.get("figures", []):
            met = "met" if each["met"] else "not met"
            goal = f"goal {each['relation']} {each['goal']:g}, {met}"
            reached = f"{each['reached']:.2f} {each['unit']}"
            print(f"  {each['name']}: {reached} ({goal}; {each['note']})", flush=True)
        if "error" in found:
            print(shown_lines(f"  error: {found['error']} [{found['code']}]"), flush=True)
        written = write(result, options.out / name)
    print(shown(str(written)))
    failed = [each for each, found in result["scenarios"].items() if "error" in found]
    if failed:
        message = f"{len(failed)} scenarios failed: {', '.join(failed)}; see the errors above"
        raise CareError(message, code="not_measured", scenarios=failed)


def _absolute(value: object) -> bool:
    return isinstance(value, Path) and value.is_absolute()


def describe(pythons: Sequence[Path] = ()) -> dict[str, Any]:
    """Returns hardware, versions, commit and date as JSON.

    `pythons` are those of peers' environments; missing ones are skipped.
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
            **_installed(Path(sys.executable)),
        },
        "other_environments": {
            python.parts[-3]: _installed(python) for python in pythons if python.exists()
        },
    }


def _installed(python: Path) -> dict[str, str]:
    """Returns the versions of installed libraries of an environment."""
    listed = json.loads(subprocess.check_output([python, "-c", _LIST]))
    found = {name.lower().replace("_", "-"): version for name, version in listed}
    return {name: found[name] for name in _LIBRARIES if name in found}


def write(result: dict[str, Any], path: Path) -> Path:
    """Writes a result and the tables of all results in its folder; returns the tables' path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, result)
    target = path.with_name(TABLE_NAME)
    target.write_text(tables(path.parent), encoding="utf-8")
    return target


def tables(folder: Path) -> str:
    """Returns the tables of all results in a folder as Markdown."""
    source = Path(__file__).with_name("results.md.j2").read_text(encoding="utf-8")
    found = {
        path.stem: json.loads(path.read_text(encoding="utf-8"))
        for path in (folder / BENCH_NAME, folder / PEERS_NAME)
        if path.exists()
    }
    return Environment(autoescape=False).from_string(source).render(**found).strip() + "\n"
