"""The YAML files of the commands; an unknown key is an error."""

import re
from pathlib import Path
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
from core.records import read_text

Language = Literal["zh", "en"]
_Name = Annotated[str, Field(pattern=r"^[\w.-]+$")]
_CODES = {"extra_forbidden": "unknown_key", "missing": "missing_key"}


def _resolve(path: Path, info: ValidationInfo) -> Path:
    return (info.context or Path()) / path


# Relative to the file that names it.
_Path = Annotated[Path, AfterValidator(_resolve)]


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


Retriever = Annotated[Bm25Retriever | PairRetriever | RunRetriever, Field(discriminator="kind")]


class Command(FrozenModel):
    """The keys of all commands that call language models."""

    output: _Path  # a folder; `cache/` in it makes the command resumable
    seed: int = 0  # of sampling
    language: Language = "zh"  # of the prompts
    attempts: int = Field(3, ge=1)  # at a valid answer to a question
    budget: Budget = Budget()


class JudgingOptions(FrozenModel):
    """How passages are presented to judges."""

    language: Language = "zh"  # of the prompt
    passages_per_call: int = Field(10, ge=1, le=100)
    passage_chars: int = Field(1500, ge=1)  # longer passages are truncated


class JudgingCommand(Command, JudgingOptions):
    """The keys of all commands that judge passages."""

    corpus: _Path  # JSONL with `_id`, `title`, `text`, `metadata`
    queries: _Path  # JSONL with `_id` and `text`
    retrievers: list[Retriever] = Field(min_length=1)
    judges: list[Endpoint] = Field(min_length=1)
    depth: int = Field(50, ge=1)  # hits of each retriever that are judged
    query_limit: int | None = Field(None, ge=1)  # size of a sample; None for all queries

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        for kind in ("retrievers", "judges"):
            names = [item.name for item in getattr(self, kind)]
            if repeated := {name for name in names if names.count(name) > 1}:
                raise ValueError(f"two {kind} have the name '{min(repeated)}'")
        return self


class Rerank(FrozenModel):
    """The greatest numbers of passages per query of the rerank set."""

    positives: int = Field(10, ge=1)
    negatives: int = Field(20, ge=1)


class BenchmarkConfig(JudgingCommand):
    """`build-benchmark`: see docs/make-a-benchmark.md."""

    split: _Name = "test"
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


class StsConfig(Command):
    """`sts`: see docs/make-a-benchmark.md."""

    questions: _Path  # JSONL with `_id` and `text`
    synonyms: _Path  # TSV: a term, and one or more synonyms
    writer: Endpoint  # writes the rewrites
    limit: int | None = Field(None, ge=1)  # size of a sample; None for all questions
    length_change: float = Field(
        0.3, gt=0, lt=1
    )  # greatest change of length by a rewrite, as a fraction


Config = TypeVar("Config", bound=Command)


def load_config(path: Path, kind: type[Config]) -> Config:
    """Reads a YAML file; its paths are relative to it. A CareError names the invalid key."""
    text = read_text(path)
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise CareError.at(path, f"is not valid YAML: {reason}", "not_yaml") from error
    if root is None or not isinstance(data, dict):
        raise CareError.at(path, "has no keys: it must be a mapping", "no_keys")
    try:
        return kind.model_validate(data, context=path.parent)
    except ValidationError as error:
        first = error.errors()[0]
        line, key = _locate(root, first["loc"])
        reason = first["msg"].removeprefix("Value error, ")
        reason = f"line {line}: {key}: {reason}" if key else f"is invalid: {reason}"
        code = _CODES.get(first["type"], "bad_value")
        raise CareError.at(path, reason, code, line=line if key else None, key=key) from error


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
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int):
            node = node.value[part]
            line = node.start_mark.line + 1
        else:
            break
        names.append(str(part))
    return line, ".".join(names)
