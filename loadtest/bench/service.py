"""Measurements of the service over HTTP, alone and beside other systems."""

import time
import traceback
from collections.abc import Mapping
from typing import Any

from core.errors import CareError
from core.terminal import shown, shown_lines
from loadtest.bench import comparison, results, scenarios
from loadtest.bench.options import ServiceOptions
from loadtest.bench.processes import options_json

# Scenarios by their names in --only.
SCENARIOS: Mapping[str, scenarios.Scenario] = {
    "efficiency": scenarios.efficiency,
    "sentence-transformers": comparison.sentence_transformers,
    "infinity": comparison.infinity,
    "idle": scenarios.idle,
    "modes": scenarios.modes,
    "overload": scenarios.overload,
    "overflow": scenarios.overflow,
    "cache": scenarios.cache,
    "redis": scenarios.redis,
}


def measure(known: Mapping[str, scenarios.Scenario], options: ServiceOptions) -> None:
    """Runs the chosen scenarios one after another and writes `bench.json` after each.

    If a scenario fails, its error is written instead of its results and the next one runs.
    """
    chosen = options.only.split(",") if options.only else list(known)
    if unknown := [name for name in chosen if name not in known]:
        message = f"unknown scenario {', '.join(unknown)}: choose from {', '.join(known)}"
        raise CareError(message, code="unknown_scenario", scenarios=unknown)
    result: dict[str, Any] = {
        "environment": results.describe([options.sentence_transformers, options.infinity]),
        "options": options_json(options),
        "scenarios": {},
    }
    for name in chosen:
        started = time.monotonic()
        print(f"{name} …", flush=True)
        try:
            found = known[name](options)
        except CareError as error:
            found = {"error": str(error), "code": error.code}
        except Exception:
            # An unexpected error of one scenario must not lose the results of the others.
            found = {"error": traceback.format_exc(), "code": "unexpected_error"}
        found["seconds"] = round(time.monotonic() - started, 1)
        result["scenarios"][name] = found
        for figure in found.get("figures", []):
            met = "met" if figure["met"] else "not met"
            goal = f"goal {figure['relation']} {figure['goal']:g}, {met}"
            reached = f"{figure['reached']:.2f} {figure['unit']}"
            print(f"  {figure['name']}: {reached} ({goal}; {figure['note']})", flush=True)
        if "error" in found:
            print(shown_lines(f"  error: {found['error']} [{found['code']}]"), flush=True)
        tables = results.write(result, options.out / results.BENCH_NAME)
    print(shown(str(tables)))
    failed = [name for name, found in result["scenarios"].items() if "error" in found]
    if failed:
        message = f"{len(failed)} scenarios failed: {', '.join(failed)}; see the errors above"
        raise CareError(message, code="not_measured", scenarios=failed)
