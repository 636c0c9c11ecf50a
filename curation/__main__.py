"""Makes benchmarks and training data with language models as judges."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from core import cli
from core.errors import CareError

# Modules by the extra that installs them.
_NEEDED = {
    "curation": ("jionlp", "krippendorff", "openai", "openpyxl", "statsmodels", "yaml"),
    "eval": ("bm25s", "ir_measures", "jieba"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status; see `core.cli.run`."""
    options = _parser().parse_args(arguments)

    def command() -> None:
        if extras := [name for name, needed in _NEEDED.items() if not all(map(find_spec, needed))]:
            message = f"install what is missing: 'care-retrieval[{','.join(extras)}]'"
            raise CareError(message, code="not_installed", extras=extras)
        for name, value in options.run(options).items():
            print(f"{name}: {value}")

    return cli.run(command)


def _ask(options: argparse.Namespace) -> dict[str, object]:
    """Runs a command that asks language models, and adds what all calls cost."""
    from curation import config as configs
    from curation.agreement import summary
    from curation.annotation import annotate
    from curation.audit import audit
    from curation.benchmark import build_benchmark
    from curation.common import COST
    from curation.sts import write_sts

    commands: dict[str, tuple[type[Any], Callable[[Any], dict[str, Any]]]] = {
        "build-benchmark": (configs.BenchmarkConfig, lambda c: summary(build_benchmark(c))),
        "audit": (configs.AuditConfig, audit),
        "annotate": (configs.AnnotationConfig, annotate),
        "sts": (configs.StsConfig, write_sts),
    }
    kind, run = commands[options.command]
    config = configs.load_config(options.config, kind)
    statistics = run(config)
    statistics.pop("agreement", None)
    costs = json.loads((config.output / COST).read_text("utf-8"))["all"]
    shown = ("calls", "reused", "invalid", "prompt_tokens", "answer_tokens", "price")
    statistics |= {f"all {name}": costs[name] for name in shown}
    return statistics | {"written to": config.output}


def _expert_sample(options: argparse.Namespace) -> dict[str, object]:
    from curation.expert import expert_sample

    pairs = expert_sample(options.benchmark, options.output, options.size, options.seed)
    return {"pairs": pairs, "written to": options.output}


def _expert_agreement(options: argparse.Namespace) -> dict[str, object]:
    from core.records import write_json
    from curation.expert import expert_agreement

    result = expert_agreement(options.labels, options.key)
    if options.output:
        write_json(options.output, result)
    return result


def _diversify(options: argparse.Namespace) -> dict[str, object]:
    from curation.diversity import RULES, DiversityOptions, diversify_file

    given = {"k": options.k, "t": options.t, "near": options.n}
    changes = {name: value for name, value in given.items() if value is not None}
    return diversify_file(
        options.texts,
        options.output,
        options.kind,
        replace(RULES[options.kind], **changes),
        DiversityOptions(options.seeds, options.seed, options.flat_limit),
        pair=options.pair,
        vectors=options.vectors,
        batch_size=options.batch_size,
        threads=options.threads,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m curation", description=__doc__)
    commands = parser.add_subparsers(metavar="COMMAND", dest="command", required=True)
    count = cli.positive_int

    def add(name: str, run: Callable[..., object], help_: str) -> argparse.ArgumentParser:
        shown = argparse.ArgumentDefaultsHelpFormatter
        command = commands.add_parser(name, help=help_, description=help_, formatter_class=shown)
        command.set_defaults(run=run)
        return command

    for name, help_ in (
        ("build-benchmark", "make a benchmark from a corpus and questions"),
        ("audit", "judge an existing benchmark again"),
        ("annotate", "make training triples from queries and a corpus"),
        ("sts", "make similarity pairs from questions and synonyms"),
    ):
        add(name, _ask, help_).add_argument("config", type=Path, help="YAML: see docs/curation.md")

    sample = add("expert-sample", _expert_sample, "write pairs of a benchmark for an expert")
    sample.add_argument("benchmark", type=Path, help="output folder of build-benchmark")
    sample.add_argument("--output", type=Path, required=True, help="folder for the files")
    sample.add_argument("--size", type=count, default=5000, help="pairs")
    sample.add_argument("--seed", type=int, default=0, help="of the sample")

    agreed = add("expert-agreement", _expert_agreement, "compare an expert's labels")
    agreed.add_argument("labels", type=Path, help="the spreadsheet that came back, CSV or XLSX")
    agreed.add_argument("--key", type=Path, required=True, help="key.jsonl of expert-sample")
    agreed.add_argument("--output", type=Path, help="also write the result as JSON")

    filter_ = add("diversify", _diversify, "drop texts that say nearly the same")
    filter_.add_argument("kind", choices=("queries", "documents"), help="chooses rule and encoder")
    filter_.add_argument("texts", type=Path, help="JSONL with text and, of documents, title")
    filter_.add_argument("--output", type=Path, required=True, help="JSONL of what is kept")
    filter_.add_argument("--pair", default="care-mini", help="the pair that encodes")
    filter_.add_argument("--vectors", type=Path, help=".npy, float32, in place of the pair's")
    filter_.add_argument("--k", type=count, help="nearest neighbours (the kind's if not given)")
    filter_.add_argument("--t", type=float, help="cosine above which they are near (likewise)")
    filter_.add_argument("--n", type=int, help="near neighbours that are allowed (likewise)")
    filter_.add_argument("--seeds", type=count, default=5000, help="texts that start the index")
    filter_.add_argument("--seed", type=int, default=0, help="of the choice of seeds")
    exact = "kept texts up to which search is exact"
    filter_.add_argument("--flat-limit", type=cli.whole_number, default=100_000, help=exact)
    filter_.add_argument("--batch-size", type=count, default=32, help="texts encoded at once")
    filter_.add_argument("--threads", type=count, default=1, help="of encoder and search")
    return parser


if __name__ == "__main__":
    sys.exit(main())
