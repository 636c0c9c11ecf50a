"""Makes benchmarks and training data with language models as judges."""

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from core.errors import CareError
from core.files import writing_in

_NEEDED = {
    "bm25s": "eval",
    "ir_measures": "eval",
    "jieba": "eval",
    "jionlp": "curation",
    "krippendorff": "curation",
    "openai": "curation",
    "openpyxl": "curation",
    "statsmodels": "curation",
    "yaml": "curation",
}


def main() -> int:
    """Runs the command; returns 1 for a user's error."""
    options = _parser().parse_args()
    try:
        if extras := {extra for name, extra in _NEEDED.items() if not find_spec(name)}:
            raise CareError(
                f"install what is missing: 'care-retrieval[{','.join(sorted(extras))}]'"
            )
        for name, value in options.run(options).items():
            print(f"{name}: {value}")
    except CareError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _build_benchmark(options: argparse.Namespace) -> dict[str, object]:
    from models.curation.agreement import summary
    from models.curation.benchmark import build_benchmark
    from models.curation.config import BenchmarkConfig, load_config

    config = load_config(options.config, BenchmarkConfig)
    statistics = build_benchmark(config)
    return dict(summary(statistics)) | _where(config.output)


def _audit(options: argparse.Namespace) -> dict[str, object]:
    from models.curation.audit import audit
    from models.curation.config import AuditConfig, load_config

    config = load_config(options.config, AuditConfig)
    statistics = audit(config)
    del statistics["agreement"]
    return statistics | _where(config.output)


def _annotate(options: argparse.Namespace) -> dict[str, object]:
    from models.curation.annotation import annotate
    from models.curation.config import AnnotationConfig, load_config

    config = load_config(options.config, AnnotationConfig)
    return annotate(config) | _where(config.output)


def _sts(options: argparse.Namespace) -> dict[str, object]:
    from models.curation.config import StsConfig, load_config
    from models.curation.sts import write_sts

    config = load_config(options.config, StsConfig)
    return write_sts(config) | _where(config.output)


def _where(output: Path) -> dict[str, object]:
    """Returns where results lie and what the calls cost in all."""
    import json

    from models.curation.work import COST

    costs = json.loads((output / COST).read_text("utf-8"))["all"]
    shown = ("calls", "reused", "set_aside", "prompt_tokens", "answer_tokens", "price")
    return {f"all {name}": costs[name] for name in shown} | {"written to": output}


def _expert_sample(options: argparse.Namespace) -> dict[str, object]:
    from models.curation.expert import expert_sample

    pairs = expert_sample(options.benchmark, options.output, options.size, options.seed)
    return {"pairs": pairs, "written to": options.output}


def _expert_agreement(options: argparse.Namespace) -> dict[str, object]:
    from models.curation.expert import expert_agreement
    from models.curation.records import write_json

    result = expert_agreement(options.labels, options.key)
    if options.output:
        with writing_in(options.output.parent):
            write_json(options.output, result)
    return result


def _diversify(options: argparse.Namespace) -> dict[str, object]:
    from models.curation.diversify import VectorSource, diversify_file
    from models.curation.diversity import RULES, DiversityOptions

    given = {"k": options.k, "t": options.t, "near": options.n}
    rule = replace(
        RULES[options.kind], **{key: value for key, value in given.items() if value is not None}
    )
    return diversify_file(
        options.texts,
        options.output,
        options.kind,
        rule,
        DiversityOptions(options.seeds, options.seed, options.flat_limit),
        VectorSource(options.pair, options.vectors, options.batch_size),
        options.threads,
    )


def _measure_voting(options: argparse.Namespace) -> dict[str, object]:
    from models.curation.voting import measure_voting

    measure_voting(options.data, options.output, **_measured(options))
    print((options.output / "voting.md").read_text("utf-8"))
    return {"written to": options.output}


def _measure_diversity(options: argparse.Namespace) -> dict[str, object]:
    from models.curation.near_duplicates import measure_diversity

    measure_diversity(options.data, options.output, **_measured(options))
    print((options.output / "diversity.md").read_text("utf-8"))
    return {"written to": options.output}


def _measured(options: argparse.Namespace) -> dict[str, Any]:
    names = ("split", "queries", "depth", "seed", "pair", "threads")
    return {name: getattr(options, name) for name in names}


def _measure_scale(options: argparse.Namespace) -> dict[str, object]:
    from models.curation.diversity import RULES
    from models.curation.scale import measure_scale

    return measure_scale(
        options.output, options.texts, options.dimension, RULES[options.kind], options.threads
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m models.curation", description=__doc__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(
        name: str, run: Callable[[argparse.Namespace], dict[str, object]], help_: str
    ) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name,
            help=help_,
            description=help_,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        command.set_defaults(run=run)
        return command

    for name, run, help_ in (
        ("build-benchmark", _build_benchmark, "make a benchmark from a corpus and questions"),
        ("audit", _audit, "judge an existing benchmark again"),
        ("annotate", _annotate, "make training triples from queries and a corpus"),
        ("sts", _sts, "make similarity pairs from questions and synonyms"),
    ):
        add(name, run, help_).add_argument("config", type=Path, help="YAML: see docs/curation.md")

    sample = add("expert-sample", _expert_sample, "write pairs of a benchmark for an expert")
    sample.add_argument("benchmark", type=Path, help="output folder of build-benchmark")
    sample.add_argument("--output", type=Path, required=True, help="folder for the files")
    sample.add_argument("--size", type=_positive, default=5000, help="pairs")
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
    filter_.add_argument("--k", type=_positive, help="nearest neighbours (the kind's if not given)")
    filter_.add_argument("--t", type=float, help="cosine above which they are near (likewise)")
    filter_.add_argument("--n", type=int, help="near neighbours that are allowed (likewise)")
    filter_.add_argument("--seeds", type=_positive, default=5000, help="texts that start the index")
    filter_.add_argument("--seed", type=int, default=0, help="of the choice of seeds")
    filter_.add_argument(
        "--flat-limit", type=int, default=100_000, help="kept texts up to which search is exact"
    )
    filter_.add_argument("--batch-size", type=_positive, default=32, help="texts encoded at once")
    filter_.add_argument("--threads", type=_positive, default=1, help="of encoder and search")

    for name, run, help_ in (
        ("measure-voting", _measure_voting, "measure votes of judges whose errors are known"),
        ("measure-diversity", _measure_diversity, "count near-duplicates among hard negatives"),
    ):
        command = add(name, run, help_)
        command.add_argument("data", type=Path, help="BEIR folder")
        command.add_argument("--output", type=Path, required=True, help="folder for results")
        command.add_argument("--split", default="dev", help="split of the data")
        command.add_argument("--queries", type=_positive, default=200, help="questions")
        command.add_argument("--depth", type=_positive, default=50, help="documents of each")
        command.add_argument("--seed", type=int, default=0, help="of the sample")
        command.add_argument("--pair", default="care-mini", help="the pair that searches")
        command.add_argument("--threads", type=_positive, default=1, help="of encoder and search")

    scale = add("measure-scale", _measure_scale, "time the diversity filter on synthetic vectors")
    scale.add_argument("--output", type=Path, required=True, help="folder for results")
    scale.add_argument("--kind", choices=("queries", "documents"), default="documents", help="rule")
    scale.add_argument("--texts", type=_positive, default=1_000_000, help="vectors")
    scale.add_argument("--dimension", type=_positive, default=384, help="of a vector")
    scale.add_argument("--threads", type=_positive, default=1, help="of a search")
    return parser


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise ValueError(text)
    return value


if __name__ == "__main__":
    sys.exit(main())
