"""`python -m loadtest.bench`: measures the service over HTTP beside what it is compared with."""

import argparse
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from loadtest.bench import environment, report
from loadtest.bench.options import BenchError, Options
from models.pairs import DEFAULT_PAIR

# By the name that --only takes; each module has `run(options)`, which returns `figures` and
# whatever they were computed from. Modules are imported when they are run.
SCENARIOS = {
    "efficiency": "efficiency",
    "sentence-transformers": "versus_sentence_transformers",
    "infinity": "versus_infinity",
    "idle": "idle",
    "overload": "overload",
    "cache": "cache_hits",
    "redis": "redis_hits",
}


def main(arguments: list[str] | None = None) -> int:
    """Runs scenarios and writes their figures; returns 1 if one could not be measured."""
    chosen = _parser().parse_args(arguments)
    options = Options(**{k: v for k, v in vars(chosen).items() if k != "only"})
    result: dict[str, Any] = {
        "environment": environment.describe([options.sentence_transformers, options.infinity]),
        "options": {k: str(v) if isinstance(v, Path) else v for k, v in asdict(options).items()},
        "scenarios": {},
    }
    for name in chosen.only:
        started = time.monotonic()
        print(f"{name} …", flush=True)
        result["scenarios"][name] = found = measure(_scenario(name), options)
        found["seconds"] = round(time.monotonic() - started, 1)
        for line in _lines(found):
            print(f"  {line}", flush=True)
        path = report.write(result, options.out / report.BENCH_NAME)
    print(path)
    return int(any("error" in found for found in result["scenarios"].values()))


def measure(run: Callable[[Options], dict[str, Any]], options: Options) -> dict[str, Any]:
    """Runs one scenario; what hinders it becomes its `error`, and the others go on."""
    try:
        return run(options)
    except BenchError as error:
        return {"error": str(error)}
    except Exception:
        # A fault of one scenario must not lose what the others have measured.
        return {"error": traceback.format_exc()}


def _scenario(name: str) -> Callable[[Options], dict[str, Any]]:
    def run(options: Options) -> dict[str, Any]:
        module = import_module(f"loadtest.bench.{SCENARIOS[name]}")
        found: dict[str, Any] = module.run(options)
        return found

    return run


def _lines(found: dict[str, Any]) -> list[str]:
    if "error" in found:
        return [f"not measured: {found['error']}"]
    return [
        f"{f['name']}: {f['reached']:.2f} {f['unit']} (goal {f['relation']} {f['goal']:g}, "
        f"{'met' if f['met'] else 'not met'}; {f['note']})"
        for f in found["figures"]
    ]


def _names(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    unknown = [name for name in names if name not in SCENARIOS]
    if unknown or not names:
        raise argparse.ArgumentTypeError(f"choose from {', '.join(SCENARIOS)}")
    return names


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench", description=__doc__)
    add = parser.add_argument
    add("--indexes", type=Path, default=Path("indexes"), help="folder of the indexes")
    add("--index", default="medical-qa", help="index that is searched")
    add("--pair", default=DEFAULT_PAIR, help="pair that it was built with")
    add("--queries", type=Path, required=True, help="JSONL with `text`")
    add("--out", type=Path, default=Path("loadtest/results"), help="folder of the results")
    add(
        "--weights",
        type=Path,
        default=Path("builds/bench/weights"),
        help="what bench.weights wrote",
    )
    add("--sentence-transformers", type=Path, default=Path(".venv-bench/bin/python"))
    add("--infinity", type=Path, default=Path(".venv-bench-infinity/bin/python"))
    add("--seconds", type=int, default=8, help="length of one measurement")
    add("--rounds", type=int, default=3, help="measurements of each kind")
    add("--connections", type=int, default=64, help="clients that fill the service")
    add("--only", type=_names, default=list(SCENARIOS), help=", ".join(SCENARIOS))
    return parser


if __name__ == "__main__":
    sys.exit(main())
