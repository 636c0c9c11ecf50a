"""What the YAML files of this package may say; an unknown key is an error."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from core.errors import CareError

Language = Literal["zh", "en"]
_Name = Annotated[str, Field(pattern=r"^[\w.-]+$")]


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
        retries: Repetitions of a call that failed for a passing reason.
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


class Washing(_Strict):
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


class RunRetriever(_Strict):
    """What any other system found: a run file in TREC format."""

    kind: Literal["run"]
    name: _Name
    path: Path


Retriever = Annotated[Bm25Retriever | PairRetriever | RunRetriever, Field(discriminator="kind")]


class _Work(_Strict):
    """What all commands that ask language models have in common.

    Attributes:
        output: The folder for results; `cache/` in it makes the command resumable.
        seed: Of sampling.
        language: Of the prompts.
        attempts: How often one question is put before its answers are set aside.
        budget: Of calls and tokens.
    """

    output: Path
    seed: int = 0
    language: Language = "zh"
    attempts: int = Field(3, ge=1)
    budget: Budget = Budget()


class _Judged(_Work):
    """Attributes of commands that judge passages.

    Attributes:
        corpus: JSONL with `_id`, `title`, `text`, `metadata`.
        queries: JSONL with `_id` and `text`.
        retrievers: Where candidates come from.
        judges: Language models that grade.
        passages_per_call: Passages that one call grades.
        passage_chars: Characters of a passage that a judge reads.
        query_limit: Judge a sample of so many queries, or None for all.
    """

    corpus: Path
    queries: Path
    retrievers: list[Retriever] = Field(min_length=1)
    judges: list[Endpoint] = Field(min_length=1)
    passages_per_call: int = Field(10, ge=1, le=100)
    passage_chars: int = Field(1500, ge=1)
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


class BenchmarkConfig(_Judged):
    """`build-benchmark`: see docs/curation.md."""

    split: _Name = "test"
    washing: Washing = Washing()
    depth: int = Field(500, ge=1)
    rerank: Rerank = Rerank()


class AuditConfig(_Judged):
    """`audit`: see docs/curation.md."""

    qrels: Path
    depth: int = Field(50, ge=1)


class AnnotationConfig(_Judged):
    """`annotate`: see docs/curation.md."""

    depth: int = Field(50, ge=1)
    max_negatives: int | None = Field(None, ge=1)

    @field_validator("judges")
    @classmethod
    def _is_one(cls, judges: list[Endpoint]) -> list[Endpoint]:
        if len(judges) > 1:
            raise ValueError("annotation takes one judge")
        return judges


class StsConfig(_Work):
    """`sts`: see docs/curation.md.

    Attributes:
        questions: JSONL with `_id` and `text`.
        synonyms: TSV: a term, and one or more synonyms.
        writer: The language model that rewrites.
        limit: Rewrite a sample of so many questions, or None for all.
        length_change: The most that a rewrite may differ in length, as a share.
    """

    questions: Path
    synonyms: Path
    writer: Endpoint
    limit: int | None = Field(None, ge=1)
    length_change: float = Field(0.3, gt=0, lt=1)


Config = TypeVar("Config", bound=_Work)


def load_config(path: Path, kind: type[Config]) -> Config:
    """Reads a YAML file; paths in it are relative to it.

    Raises:
        CareError: If it cannot be read, or a key of it is unknown, missing or wrong.
    """
    try:
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except OSError as error:
        raise CareError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CareError(f"{path} is not UTF-8") from error
    except yaml.YAMLError as error:
        raise CareError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if root is None or not isinstance(data, dict):
        raise CareError(f"{path} holds no keys")
    try:
        config = kind.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        line, key = _locate(root, first["loc"])
        where = f"{path} line {line}: {key}: " if key else f"{path}: "
        raise CareError(f"{where}{first['msg'].removeprefix('Value error, ')}") from error
    return _resolved(config, path.parent)


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


_Model = TypeVar("_Model", bound=BaseModel)


def _resolved(model: _Model, folder: Path) -> _Model:
    """Returns `model` with all its paths, and those of pairs in TOML files, based on `folder`."""
    changes: dict[str, Any] = {}
    for name in type(model).model_fields:
        value = getattr(model, name)
        if isinstance(value, Path) or (name == "pair" and value.endswith(".toml")):
            changes[name] = (
                type(value)(folder / value) if isinstance(value, Path) else str(folder / value)
            )
        elif isinstance(value, list):
            changes[name] = [
                _resolved(item, folder) if isinstance(item, BaseModel) else item for item in value
            ]
    return model.model_copy(update=changes)
