"""The commands that a YAML file configures: run by name, with the costs of their calls."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from curation import config as configs
from curation.agreement import summary
from curation.benchmark import annotate, audit, build_benchmark
from curation.common import COST
from curation.config import load_config
from curation.mixing import mix
from curation.sts import write_sts

# The fields of cost.json that a command reports.
_COSTS = ("calls", "reused", "invalid", "prompt_tokens", "answer_tokens", "price")


def run_command(
    name: str,
    path: Path,
    *,
    data: Path | None = None,
    prompts: Path | None = None,
    changes: Sequence[str] = (),
) -> dict[str, object]:
    """Runs build-benchmark, audit, annotate, sts or mix with a YAML file.

    Returns:
        The main statistics; `cost_calls`, `cost_price` and so on, the costs of all runs in the
        output folder, of commands that call language models; and `output`, that folder.
    """
    commands: dict[str, tuple[type[Any], Callable[[Any], dict[str, Any]]]] = {
        "build-benchmark": (configs.BenchmarkConfig, lambda c: summary(build_benchmark(c))),
        "audit": (configs.AuditConfig, audit),
        "annotate": (configs.AnnotationConfig, annotate),
        "sts": (configs.StsConfig, write_sts),
        "mix": (configs.MixConfig, mix),
    }
    kind, run = commands[name]
    if prompts:
        changes = [*changes, f"prompts={json.dumps(str(prompts.absolute()))}"]
    config = load_config(path, kind, data=data, changes=changes)
    statistics = run(config)
    statistics.pop("agreement", None)
    if isinstance(config, configs.Command):
        costs = json.loads((config.output / COST).read_text("utf-8"))["all"]
        statistics |= {f"cost_{cost}": costs[cost] for cost in _COSTS}
    return statistics | {"output": str(config.output.resolve())}
