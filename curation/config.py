"""The YAML files of the commands; an unknown key is an error."""

import re
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Annotated, Any, Literal, Self, TypeVar

import yaml
from pydantic import (
    AfterValidator,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from core.encoders import FrozenModel
from core.errors import CareError
from core.records import parse_yaml, read_small_text

Language = Literal["zh", "en"]
_Name = Annotated[str, Field(pattern=r"^[\w.-]+$")]


def _resolve(path: Path, info: ValidationInfo) -> Path:
    return (info.context or Path()) / path


# Relative to the file that names it.
_Path = Annotated[Path, AfterValidator(_resolve)]


def _check_names(**named: Sequence[Any]) -> None:
    for kind, items in named.items():
        names = [item.name for item in items]
        if repeated := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"two {kind} have the name '{min(repeated)}'")


class Endpoint(FrozenModel):
    """A language model behind an OpenAI-compatible server."""

    name: _Name  # in files and reports; `name` and `model` identify cached answers
    base_url: str = Field(pattern=r"^https?://\S+$")  # including `/v1`
    model: str = Field(min_length=1)  # its name on the server
    api_key_env: str | None = None  # environment variable with the API key; None sends no key
    concurrency: int = Field(8, ge=1)  # concurrent calls
    timeout: float = Field(120.0, gt=0)  # of a call [s]
    retries: int = Field(6, ge=0)  # of a call after transient failures
    backoff: float = Field(1.0, gt=0)  # longest wait before the first retry [s]; doubles with each
    temperature: float = Field(0.0, ge=0)
    seed: int | None = None  # of sampling; None omits it
    max_tokens: int = Field(512, ge=1)  # of a completion
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    # How JSON is requested: by its schema, as any object, or by the prompt alone.
    structured: Literal["json_schema", "json_object", "none"] = "json_schema"
    extra_body: dict[str, Any] = Field(default_factory=dict)  # additional fields of each request
    input_price: float = Field(0.0, ge=0)  # per million prompt tokens
    output_price: float = Field(0.0, ge=0)  # per million completion tokens


class Budget(FrozenModel):
    """Limits on all runs in the output folder together; None for no limit."""

    calls: int | None = Field(None, ge=0)
    tokens: int | None = Field(None, ge=0)


class Cleaning(FrozenModel):
    """Lengths [characters] of the texts that are kept, and whether texts are anonymised."""

    anonymize: bool = True
    query_chars: tuple[int, int] = (4, 500)
    document_chars: tuple[int, int] = (10, 5000)


class Bm25Retriever(FrozenModel):
    """BM25 over the words of jieba."""

    kind: Literal["bm25"]
    name: _Name = "bm25"


class PairRetriever(FrozenModel):
    """A pair of encoders and exact search; a pair's name or the path of a TOML file."""

    kind: Literal["pair"]
    pair: str
    name: _Name
    batch_size: int = Field(32, ge=1)
    threads: int = Field(1, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _is_named_as_its_pair(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("pair"), str):
            return {"name": re.sub(r"[^\w.-]", "-", Path(data["pair"]).stem)} | data
        return data

    @field_validator("pair")
    @classmethod
    def _is_relative_to_the_file(cls, pair: str, info: ValidationInfo) -> str:
        return str(_resolve(Path(pair), info)) if pair.endswith(".toml") else pair


class RunRetriever(FrozenModel):
    """The hits of another system: a run file in TREC format."""

    kind: Literal["run"]
    name: _Name
    path: _Path


class ServiceRetriever(FrozenModel):
    """A running search service with an index of the same documents."""

    kind: Literal["service"]
    name: _Name
    url: str = Field(pattern=r"^https?://\S+$")


Retriever = Annotated[
    Bm25Retriever | PairRetriever | RunRetriever | ServiceRetriever, Field(discriminator="kind")
]


class Command(FrozenModel):
    """The keys of all commands that call language models."""

    output: _Path  # a folder; `cache/` in it makes the command resumable
    seed: int = 0  # of sampling
    language: Language = "zh"  # of the prompts
    prompts: _Path | None = None  # YAML file of prompts that replace those of curation/prompts.yaml
    attempts: int = Field(3, ge=1)  # at a valid answer to a question
    budget: Budget = Budget()


class JudgingOptions(FrozenModel):
    """What judges are asked, and how passages are presented to them."""

    language: Language = "zh"  # of the prompt
    prompts: _Path | None = None
    # `grade`: a grade of S, A, B, C, D for each passage. `classify`: positive or negative ones.
    method: Literal["grade", "classify"] = "grade"
    passages_per_call: int = Field(10, ge=1, le=100)  # 100 by default for `classify`
    passage_chars: int = Field(1500, ge=1)  # longer passages are truncated

    @model_validator(mode="before")
    @classmethod
    def _classes_take_one_call(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("method") == "classify":
            return {"passages_per_call": 100} | data
        return data


class JudgingCommand(Command, JudgingOptions):
    """The keys of all commands that judge passages."""

    corpus: _Path  # JSONL with `_id`, `title`, `text`, `metadata`
    queries: _Path  # JSONL with `_id` and `text`
    retrievers: list[Retriever] = Field(min_length=1)
    judges: list[Endpoint] = Field(min_length=1)
    depth: int = Field(50, ge=1)  # hits of each retriever
    # Documents of a query that are judged: the `depth` best of all retrievers by reciprocal rank
    # fusion, or all of them.
    pool: Literal["fused", "union"] = "fused"
    query_limit: int | None = Field(None, ge=1)  # size of a sample; None for all queries
    vectors: _Path | None = None  # folder of cached vectors; None for `cache/vectors` of the output

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        _check_names(retrievers=self.retrievers, judges=self.judges)
        return self


class Rerank(FrozenModel):
    """The greatest numbers of passages per query of the rerank set."""

    positives: int = Field(10, ge=1)
    negatives: int = Field(20, ge=1)


# Numbers of questions by split, disjoint; None takes the rest. The split `train` is for training.
Splits = Annotated[dict[_Name, Annotated[int, Field(ge=1)] | None], Field(min_length=1)]
TRAIN = "train"


class BenchmarkConfig(JudgingCommand):
    """`build-benchmark`: see docs/make-a-benchmark.md."""

    splits: Splits = Field(default={"test": None})
    # What becomes of pairs on which judges differ, see `curation.benchmark.refined`.
    disputed: Literal["exclude", "drop", "keep"] = "exclude"
    cleaning: Cleaning = Cleaning()
    depth: int = Field(500, ge=1)
    rerank: Rerank = Rerank()


class AuditConfig(JudgingCommand):
    """`audit`: see docs/make-a-benchmark.md."""

    qrels: _Path


class AnnotationConfig(JudgingCommand):
    """`annotate`: see docs/make-a-benchmark.md."""

    judges: list[Endpoint] = Field(min_length=1, max_length=1)
    cleaning: Cleaning | None = None  # None reads the texts as they are
    max_negatives: int | None = Field(None, ge=1)  # of each query; None for all


class StsSplit(FrozenModel):
    """The questions of a split of `sts`."""

    questions: _Path  # JSONL with `_id` and `text`
    limit: int | None = Field(None, ge=1)  # size of a sample; None for all questions


class StsConfig(Command):
    """`sts`: see docs/make-a-benchmark.md."""

    splits: dict[_Name, StsSplit] = Field(min_length=1)
    synonyms: _Path  # TSV: a term, and one or more synonyms
    writer: Endpoint  # writes the rewrites
    # Greatest change of length by a rewrite, as a fraction.
    length_change: float = Field(0.3, gt=0, lt=1)
    # Rewrites of each question that are written, one at random or all three; the split `train`
    # always has all, because a training triple needs both labels.
    rewrites: Literal["one", "all"] = "one"


class _MixSource(FrozenModel):
    name: _Name  # in the report
    path: _Path
    limit: int | None = Field(None, ge=1)  # size of a random sample; None for all


class TriplesSource(_MixSource):
    """JSONL with `query`, `positives` and `negatives`: triples, or a reranking set."""

    kind: Literal["triples"]


class StsSource(_MixSource):
    """JSONL with `text1`, `text2` and `label`: the output of `sts`."""

    kind: Literal["sts"]


class BeirSplit(FrozenModel):
    """A split of a BEIR folder."""

    path: _Path
    split: _Name


class BeirSource(_MixSource, BeirSplit):
    """The judgements of a split of a BEIR folder."""

    kind: Literal["beir"]


Source = Annotated[TriplesSource | StsSource | BeirSource, Field(discriminator="kind")]


class MixConfig(FrozenModel):
    """`mix`: see docs/make-a-benchmark.md."""

    output: _Path  # the data folder of recipes
    seed: int = 0
    sources: list[Source] = Field(min_length=1)
    dev: BeirSplit | None = None  # becomes the split dev of the folder dev/
    held_out: list[BeirSplit] = Field(default_factory=list)  # whose queries are dropped

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        _check_names(sources=self.sources)
        return self


_CODES = {"extra_forbidden": "unknown_key", "missing": "missing_key"}

Config = TypeVar("Config", bound=FrozenModel)


def load_config(
    path: Path, kind: type[Config], *, data: Path | None = None, changes: Sequence[str] = ()
) -> Config:
    """Reads a YAML file with the keys of `kind`; its paths are relative to it.

    The key `data` is a folder, which replaces `${data}` in all texts of the file.

    Args:
        data: Replaces the key `data`; relative to the current folder.
        changes: `KEY=VALUE`, with a dotted key (`judges.0.model=m`) and a YAML value.
    """
    text = read_small_text(path)
    try:
        values = parse_yaml(text)
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise CareError.at(path, f"is not valid YAML: {reason}", "not_yaml") from error
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if root is None or not isinstance(values, dict):
        raise CareError.at(path, "has no keys: it must be a mapping", "no_keys")
    for change in changes:
        _change(values, change)
    folder = values.pop("data", None)
    if data or isinstance(folder, str):
        values = _substitute(values, str((data or path.parent / str(folder)).absolute()))
    try:
        return kind.model_validate(values, context=path.parent)
    except ValidationError as error:
        first = error.errors()[0]
        line, key = _locate(root, first["loc"])
        reason = first["msg"].removeprefix("Value error, ")
        reason = f"line {line}: {key}: {reason}" if key else f"is invalid: {reason}"
        code = _CODES.get(first["type"], "bad_value")
        raise CareError.at(path, reason, code, line=line if key else None, key=key) from error


def _change(values: Any, change: str) -> None:
    """Sets the value of a dotted key; entries of lists are addressed by their number, from 0."""
    name, equals, text = change.partition("=")
    *parents, last = name.split(".")
    try:
        value = parse_yaml(text)
        if not equals:
            raise ValueError
        for part in parents:
            values = values[int(part)] if isinstance(values, list) else values.setdefault(part, {})
        values[int(last) if isinstance(values, list) else last] = value
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        message = f"--set {change} is not KEY=VALUE with a dotted key that the file can have"
        raise CareError(message, code="bad_change", key=name) from error


def _substitute(value: Any, folder: str) -> Any:
    if isinstance(value, str):
        return Template(value).safe_substitute(data=folder)
    if isinstance(value, dict):
        return {key: _substitute(item, folder) for key, item in value.items()}
    return [_substitute(item, folder) for item in value] if isinstance(value, list) else value


def _locate(node: yaml.Node, location: tuple[int | str, ...]) -> tuple[int, str]:
    """Returns the line and the dotted name of a key; the line of its parent if it is missing."""
    line, names = node.start_mark.line + 1, []
    for part in location:
        if isinstance(node, yaml.MappingNode):
            found = [pair for pair in node.value if pair[0].value == str(part)]
            if not found:
                if any(part == value.value for _, value in node.value):
                    continue  # pydantic adds the tag of a union to the location
                names.append(str(part))
                break
            line, node = found[0][0].start_mark.line + 1, found[0][1]
        elif isinstance(node, yaml.SequenceNode) and part in range(len(node.value)):
            node = node.value[part]
            line = node.start_mark.line + 1
        else:
            break
        names.append(str(part))
    return line, ".".join(names)
