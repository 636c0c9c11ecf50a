"""The YAML files of the commands; an unknown key is an error."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from core.errors import CareError
from core.records import read_text

Language = Literal["zh", "en"]
_Name = Annotated[str, Field(pattern=r"^[\w.-]+$")]
_CODES = {"extra_forbidden": "unknown_key", "missing": "missing_key"}


def _resolve(path: Path, info: ValidationInfo) -> Path:
    return (info.context or Path()) / path


# Relative to the file that names it.
_Path = Annotated[Path, AfterValidator(_resolve)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Endpoint(_Strict):
    """A language model behind an OpenAI-compatible server.

    Attributes:
        name: What files and reports call it; with `model` the identity of its cached answers.
        base_url: The server's address, up to `/v1`.
        model: The name that the server knows the model by.
        api_key_env: The environment variable that holds the key, or None for no key.
        concurrency: Calls at once.
        timeout: The longest wait for one answer [s].
        retries: Repetitions of a call that failed for a transient reason.
        backoff: The longest wait before the first repetition, doubled by each [s].
        temperature: Of sampling.
        seed: Of sampling, or None to send none.
        max_tokens: The most tokens of an answer.
        max_tokens_field: What the server calls them.
        structured: How the server is asked for JSON: under the schema, as any object, or by
            the prompt alone.
        extra_body: More fields of each request.
        input_price: Price of a million prompt tokens.
        output_price: Price of a million answer tokens.
    """

    name: _Name
    base_url: str = Field(pattern=r"^https?://\S+$")
    model: str = Field(min_length=1)
    api_key_env: str | None = None
    concurrency: int = Field(8, ge=1)
    timeout: float = Field(120.0, gt=0)
    retries: int = Field(6, ge=0)
    backoff: float = Field(1.0, gt=0)
    temperature: float = Field(0.0, ge=0)
    seed: int | None = None
    max_tokens: int = Field(512, ge=1)
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    structured: Literal["json_schema", "json_object", "none"] = "json_schema"
    extra_body: dict[str, Any] = Field(default_factory=dict)
    input_price: float = Field(0.0, ge=0)
    output_price: float = Field(0.0, ge=0)


class Budget(_Strict):
    """What may be spent in all, earlier runs in the same output folder included."""

    calls: int | None = Field(None, ge=0)
    tokens: int | None = Field(None, ge=0)


class Cleaning(_Strict):
    """Which texts are kept, by their length [characters]; whether they are anonymised."""

    anonymize: bool = True
    query_chars: tuple[int, int] = (4, 500)
    document_chars: tuple[int, int] = (10, 5000)


class Bm25Retriever(_Strict):
    """BM25 over words that jieba cuts."""

    kind: Literal["bm25"]
    name: _Name = "bm25"


class PairRetriever(_Strict):
    """A pair of encoders and exact search; a registered name or the path of a TOML file."""

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


class RunRetriever(_Strict):
    """What any other system found: a run file in TREC format."""

    kind: Literal["run"]
    name: _Name
    path: _Path


Retriever = Annotated[Bm25Retriever | PairRetriever | RunRetriever, Field(discriminator="kind")]


class _Command(_Strict):
    """What all commands that ask language models have in common.

    Attributes:
        output: The folder for results; `cache/` in it makes the command resumable.
        seed: Of sampling.
        language: Of the prompts.
        attempts: How often one question is asked before it is left without a valid answer.
        budget: Of calls and tokens.
    """

    output: _Path
    seed: int = 0
    language: Language = "zh"
    attempts: int = Field(3, ge=1)
    budget: Budget = Budget()


class JudgingOptions(_Strict):
    """How passages are put to judges.

    Attributes:
        language: Of the prompt.
        passages_per_call: Passages that one call grades.
        passage_chars: Characters of a passage that a judge reads.
    """

    language: Language = "zh"
    passages_per_call: int = Field(10, ge=1, le=100)
    passage_chars: int = Field(1500, ge=1)


class JudgingCommand(_Command, JudgingOptions):
    """What commands that judge passages have in common.

    Attributes:
        corpus: JSONL with `_id`, `title`, `text`, `metadata`.
        queries: JSONL with `_id` and `text`.
        retrievers: Where candidates come from.
        judges: Language models that grade.
        depth: Documents of each retriever that are judged.
        query_limit: Judge a sample of so many queries, or None for all.
    """

    corpus: _Path
    queries: _Path
    retrievers: list[Retriever] = Field(min_length=1)
    judges: list[Endpoint] = Field(min_length=1)
    depth: int = Field(50, ge=1)
    query_limit: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        for kind in ("retrievers", "judges"):
            names = [item.name for item in getattr(self, kind)]
            if repeated := {name for name in names if names.count(name) > 1}:
                raise ValueError(f"two {kind} are named '{min(repeated)}'")
        return self


class Rerank(_Strict):
    """How many passages of each query the rerank set holds at most."""

    positives: int = Field(10, ge=1)
    negatives: int = Field(20, ge=1)


class BenchmarkConfig(JudgingCommand):
    """`build-benchmark`: see docs/curation.md."""

    split: _Name = "test"
    cleaning: Cleaning = Cleaning()
    depth: int = Field(500, ge=1)
    rerank: Rerank = Rerank()


class AuditConfig(JudgingCommand):
    """`audit`: see docs/curation.md."""

    qrels: _Path


class AnnotationConfig(JudgingCommand):
    """`annotate`: see docs/curation.md."""

    max_negatives: int | None = Field(None, ge=1)

    @field_validator("judges")
    @classmethod
    def _is_one(cls, judges: list[Endpoint]) -> list[Endpoint]:
        if len(judges) > 1:
            raise ValueError("annotation takes one judge")
        return judges


class StsConfig(_Command):
    """`sts`: see docs/curation.md.

    Attributes:
        questions: JSONL with `_id` and `text`.
        synonyms: TSV: a term, and one or more synonyms.
        writer: The language model that rewrites.
        limit: Rewrite a sample of so many questions, or None for all.
        length_change: The most that a rewrite may differ in length, as a share.
    """

    questions: _Path
    synonyms: _Path
    writer: Endpoint
    limit: int | None = Field(None, ge=1)
    length_change: float = Field(0.3, gt=0, lt=1)


Config = TypeVar("Config", bound=_Command)


def load_config(path: Path, kind: type[Config]) -> Config:
    """Reads a YAML file; paths in it are relative to it.

    Raises:
        CareError: If it cannot be read, or a key of it is unknown, missing or wrong.
    """
    text = read_text(path)
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise CareError(
            f"{path} is not valid YAML: {reason}", code="not_yaml", path=path
        ) from error
    if root is None or not isinstance(data, dict):
        raise CareError(f"{path} holds no keys", code="no_keys", path=path)
    try:
        return kind.model_validate(data, context=path.parent)
    except ValidationError as error:
        first = error.errors()[0]
        line, key = _locate(root, first["loc"])
        where = f"{path} line {line}: {key}: " if key else f"{path}: "
        raise CareError(
            f"{where}{first['msg'].removeprefix('Value error, ')}",
            code=_CODES.get(first["type"], "bad_value"),
            path=path,
            line=line if key else None,
            key=key,
        ) from error


def _locate(node: yaml.Node, location: tuple[int | str, ...]) -> tuple[int, str]:
    """Returns the line and the dotted name of a key; the line is its parent's if it is missing."""
    line, names = node.start_mark.line + 1, []
    for part in location:
        if isinstance(node, yaml.MappingNode):
            found = [pair for pair in node.value if pair[0].value == str(part)]
            if not found:
                if any(part == value.value for _, value in node.value):
                    continue  # the tag of a union, as pydantic names it
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
