"""Options of benchmarks over HTTP, and their results with goals and the machine."""

import json
import platform
import shutil
import subprocess
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

from typer import Option

from core.choices import DEFAULT_INDEXES, DEFAULT_PAIR
from core.errors import CareError
from core.machine import available_cpus
from core.provenance import commit, hardware, library_versions
from core.records import write_json
from core.terminal import shown, shown_lines
from loadtest.traffic import SAMPLE


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """Options of `care bench service` and `care bench peers`."""

    indexes: Annotated[
        Path, Option(envvar="CARE_INDEXES", metavar="FOLDER", help="Folder of all indexes.")
    ] = DEFAULT_INDEXES
    index: Annotated[
        str, Option(envvar="CARE_INDEX", metavar="NAME", help="Name of the index.")
    ] = "medical-qa"
    pair: Annotated[
        str,
        Option(
            envvar="CARE_PAIR",
            metavar="PAIR",
            help="Trained or registered pair, or path of a pair's .toml file.",
        ),
    ] = DEFAULT_PAIR
    workers: Annotated[
        int,
        Option(
            min=1,
            envvar="CARE_WORKERS",
            metavar="N",
            help="Workers of the service.",
            show_default="one for each processor",
        ),
    ] = available_cpus()
    queries: Annotated[Path, Option(metavar="FILE", help="JSONL of queries with text.")] = SAMPLE
    out: Annotated[Path, Option(metavar="FOLDER", help="Folder of results.")] = Path(
        "loadtest/results"
    )
    seconds: Annotated[int, Option(min=1, help="Seconds of one measurement.")] = 8
    rounds: Annotated[
        int, Option(min=1, help="Rounds; the compared systems alternate in each.")
    ] = 3
    connections: Annotated[
        int, Option(min=1, help="Concurrent clients that saturate the service.")
    ] = 64
    top_k: Annotated[int, Option(min=1, help="Number of hits per query.")] = 10
    only: Annotated[
        str, Option(metavar="NAMES", help="Scenarios to run, separated by commas (default: all).")
    ] = ""


# Takes the options; returns its `figures` (metrics with goals) and raw results.
Scenario = Callable[[ServiceOptions], dict[str, Any]]

# Modules of the service that decide how fast it is.
_LIBRARIES = ("faiss", "numpy", "onnxruntime", "pyarrow", "tokenizers")


def figure(
    name: str,
    reached: float,
    relation: Literal[">=", "<="],
    goal: float,
    unit: str = "",
    note: str = "",
) -> dict[str, Any]:
    """Returns a measured value with its goal as JSON.

    `relation` says whether the goal is a minimum or a maximum. `unit` is "" for a ratio; `note` has
    details, such as the values that a ratio is computed from.
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


def measure(known: Mapping[str, Scenario], options: ServiceOptions, name: str = "bench") -> None:
    """Runs the chosen scenarios one after another and writes the results after each.

    If a scenario fails, its error is written instead of its results and the next one runs.
    """
    chosen = options.only.split(",") if options.only else list(known)
    if unknown := [each for each in chosen if each not in known]:
        message = f"unknown scenario {', '.join(unknown)}: choose from {', '.join(known)}"
        raise CareError(message, code="unknown_scenario", scenarios=unknown)
    # Absolute paths say nothing on another machine.
    paths = {key: Path(value).name for key, value in asdict(options).items() if _absolute(value)}
    result: dict[str, Any] = {
        "environment": environment(),
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
        options.out.mkdir(parents=True, exist_ok=True)
        write_json(options.out / f"{name}.json", result)
        (options.out / f"{name}.md").write_text(table(result), encoding="utf-8")
    print(shown(str(options.out / f"{name}.md")))
    failed = [each for each, found in result["scenarios"].items() if "error" in found]
    if failed:
        message = f"{len(failed)} scenarios failed: {', '.join(failed)}; see the errors above"
        raise CareError(message, code="not_measured", scenarios=failed)


def _absolute(value: object) -> bool:
    return isinstance(value, Path) and value.is_absolute()


def environment() -> dict[str, Any]:
    """Returns hardware, versions, commit and date as JSON."""
    wrk = shutil.which("wrk") and subprocess.run(["wrk", "-v"], capture_output=True, text=True)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "hardware": hardware(),
        "versions": {
            "python": platform.python_version(),
            "wrk": wrk.stdout.split()[1] if wrk else "missing",
            **library_versions(*_LIBRARIES),
        },
    }


def table(result: dict[str, Any]) -> str:
    """Returns the figures of a result as Markdown."""
    found, options = result["environment"], result["options"]
    machine, source = found["hardware"], found["commit"] or {"id": "unknown", "changed": False}
    kind = ", ".join([machine["processor"], *machine["instructions"]])
    changed = " with uncommitted changes" if source["changed"] else ""
    lines = [
        f"- {found['date']}, commit {source['id'][:12]}{changed}",
        f"- {machine['processors']} CPUs ({kind}), {machine['memory_bytes'] / 2**30:.0f} GiB of "
        f"memory; load average before the run {machine['load_average'][0]:.1f}",
        f"- {', '.join(f'{name} {number}' for name, number in found['versions'].items())}",
        f"- Index {options['index']}, pair {options['pair']}. Values are medians of "
        f"{options['rounds']} rounds of {options['seconds']} s, in which the compared systems "
        "alternate. The load generator runs on the same CPUs.",
        "",
        "| scenario | metric | value | goal | met | details |",
        "|---|---|---|---|---|---|",
    ]
    for name, scenario in result["scenarios"].items():
        if "error" in scenario:
            reason = scenario["error"].splitlines()[0].replace("|", "\\|")
            lines.append(f"| {name} | not measured | | | no | {reason} |")
        for each in scenario.get("figures", []):
            unit = f" {each['unit']}" if each["unit"] else ""
            lines.append(
                f"| {name} | {each['name']} | {each['reached']:.2f}{unit} | "
                f"{'≥' if each['relation'] == '>=' else '≤'} {each['goal']:g}{unit} | "
                f"{'yes' if each['met'] else 'no'} | {each['note']} |"
            )
    return "\n".join(lines) + "\n"
