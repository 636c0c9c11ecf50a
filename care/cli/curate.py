"""`care curate`: benchmarks and training data, judged by language models."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Argument, Option

from care.cli.options import Changes, Json
from care.cli.output import show
from care.extras import require
from care.options import PairName, file, folder
from core.choices import DEFAULT_PAIR

app = typer.Typer(
    no_args_is_help=True,
    help="Make benchmarks and training data with language models as judges.",
)

Config = Annotated[
    Path, Argument(metavar="CONFIG", help="YAML file: see docs/make-a-benchmark.md.")
]
Data = Annotated[Path | None, folder("Replaces ${data} in the file.", show_default="the key data")]
PromptFile = Annotated[
    Path | None,
    file("YAML file of prompts, instead of the default ones.", show_default="the key prompts"),
]


_BY_RECIPE = {
    "build-benchmark": "Make a benchmark from a corpus and questions.",
    "audit": "Judge an existing benchmark again.",
    "annotate": "Make training triples from queries and a corpus.",
    "sts": "Make pairs of similar sentences from questions and synonyms.",
}


@app.command()
def clean(
    queries: Annotated[Path, file("JSONL of questions: _id and text.")],
    corpus: Annotated[Path, file("JSONL of documents: _id, text and perhaps title.")],
    output: Annotated[Path, folder("The data folder of recipes.")],
    benchmark: Annotated[
        int, Option(min=0, help="Questions that are kept apart for a benchmark.")
    ] = 0,
    seed: Annotated[int, Option(help="Seed of the choice of these questions.")] = 0,
    json_: Json = False,
) -> None:
    """Clean and anonymise raw questions and documents, and pair them."""
    _require()
    from curation.cleaning import clean_texts

    result = clean_texts(queries, corpus, output, benchmark=benchmark, seed=seed)
    _show(result, json_)


def _by_recipe(name: str) -> Callable[..., None]:
    def run(
        config: Config,
        data: Data = None,
        prompts: PromptFile = None,
        changes: Changes = None,
        json_: Json = False,
    ) -> None:
        _run(name, config, json_, data=data, prompts=prompts, changes=changes or ())

    return run


for _name, _help in _BY_RECIPE.items():
    app.command(_name, help=_help)(_by_recipe(_name))


@app.command()
def reword(
    queries: Annotated[Path, Argument(metavar="FILE", help="JSONL of questions: _id and text.")],
    output: Annotated[Path, file("JSONL of the rewordings: _id, text, original, original_text.")],
    part: Annotated[
        Literal["a", "b"], Option(help="Part of the rules: a to train with, b to measure with.")
    ] = "a",
    versions: Annotated[int, Option(min=1, help="Largest number of rewordings of a question.")] = 1,
    terms: Annotated[
        str | None,
        Option(
            metavar="LIST",
            help="Also replace the clinical terms of a list by its words: everyday or a TSV file.",
        ),
    ] = None,
    errors: Annotated[
        int,
        Option(min=0, help="Instead, write up to this many wrong characters in each question."),
    ] = 0,
    seed: Annotated[int, Option(help="Seed of all random choices.")] = 0,
    json_: Json = False,
) -> None:
    """Reword questions in patients' everyday words, or misspell them, by rules."""
    _require()
    from core.terms import term_list
    from curation.rewording import misspell, write_reworded
    from curation.rewording import reword as by_rules

    if errors:
        make = partial(misspell, errors=errors, versions=versions, seed=seed)
    else:
        words = term_list(terms) if terms else None
        make = partial(by_rules, part=part, versions=versions, seed=seed, terms=words)
    _show(write_reworded(queries, output, make), json_)


@app.command()
def mix(config: Config, data: Data = None, changes: Changes = None, json_: Json = False) -> None:
    """Mix annotated triples with the training splits of the tasks."""
    _run("mix", config, json_, data=data, changes=changes or ())


@app.command("expert-sample")
def expert_sample(
    benchmark: Annotated[
        Path, Argument(metavar="FOLDER", help="Output folder of build-benchmark or audit.")
    ],
    output: Annotated[Path, folder("Folder of the files to write.")],
    size: Annotated[int, Option(min=1, help="Number of pairs.")] = 5000,
    seed: Annotated[int, Option(help="Seed of the sample.")] = 0,
    json_: Json = False,
) -> None:
    """Write agreed pairs, or false negatives of an audit, as a spreadsheet for an expert."""
    _require()
    from curation.expert import expert_sample as write_sample

    pairs = write_sample(benchmark, output, size, seed)
    _show({"pairs": pairs, "output": str(output)}, json_)


@app.command("expert-agreement")
def expert_agreement(
    labels: Annotated[
        Path, Argument(metavar="FILE", help="The labelled spreadsheet, CSV or XLSX.")
    ],
    key: Annotated[Path, file("key.jsonl of expert-sample.")],
    output: Annotated[Path | None, file("Also write the result as JSON.")] = None,
    json_: Json = False,
) -> None:
    """Compare an expert's labels with the judges."""
    _require()
    from core.records import write_json
    from curation.expert import expert_agreement as compare

    result = compare(labels, key)
    if output:
        write_json(output, result)
    _show(result, json_)


@app.command()
def diversify(
    kind: Annotated[
        Literal["queries", "documents"],
        Argument(metavar="KIND", help="queries or documents: selects the rule and the encoder."),
    ],
    texts: Annotated[
        Path, Argument(metavar="FILE", help="JSONL with text and, for documents, title.")
    ],
    output: Annotated[Path, file("JSONL of the kept lines.")],
    pair: PairName = DEFAULT_PAIR,
    vectors: Annotated[Path | None, file(".npy of float32 vectors, instead of encoding.")] = None,
    k: Annotated[int, Option(min=1, help="Nearest kept texts that are compared.")] = 5,
    t: Annotated[
        float | None,
        Option(
            help="Cosine above which two texts are near duplicates.",
            show_default="depends on pair and KIND",
        ),
    ] = None,
    n: Annotated[int, Option(help="Near duplicates among the k that are allowed.")] = 1,
    distinct: Annotated[
        Path | None, file("JSONL of texts that are known to differ, to derive --t from.")
    ] = None,
    seeds: Annotated[
        int | None,
        Option(
            min=1,
            help="Texts that are kept without a check, to start the index.",
            show_default="5000, or a tenth of the texts if that is less",
        ),
    ] = None,
    seed: Annotated[int, Option(help="Seed of the random choice of these texts.")] = 0,
    flat_limit: Annotated[
        int, Option(min=0, help="Kept texts up to which the search is exact.")
    ] = 100_000,
    batch_size: Annotated[int, Option(min=1, help="Texts per batch of the encoder.")] = 32,
    threads: Annotated[int, Option(min=1, help="Threads of encoder and search.")] = 1,
    json_: Json = False,
) -> None:
    """Drop near-duplicate texts."""
    _require()
    from curation.diversity import DiversityOptions, diversify_file

    result = diversify_file(
        texts,
        output,
        kind,
        DiversityOptions(seeds, seed, flat_limit),
        k=k,
        t=t,
        near=n,
        pair=pair,
        vectors=vectors,
        distinct=distinct,
        batch_size=batch_size,
        threads=threads,
    )
    _show(result, json_)


def _require() -> None:
    require("curation", "eval")


def _run(command: str, config: Path, as_json: bool, **options: Any) -> None:
    _require()
    from curation.commands import run_command

    _show(run_command(command, config, **options), as_json)


def _show(result: Mapping[str, Any], as_json: bool) -> None:
    show(result, (f"{name}: {value}" for name, value in result.items()), as_json=as_json)
