"""What a recipe says besides its stages: encoders, data, and what is measured on."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from core.encoders import Pooling, Role

Precision = Literal["fp32", "bf16", "fp16"]
Positive = Annotated[int, Field(gt=0)]
# What numpy's generators take.
Seed = Annotated[int, Field(ge=0, lt=2**32)]
# Folders are named after stages.
StageName = Annotated[str, Field(pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]*)?$")]
Layers = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class Settings(BaseModel):
    """A part of a recipe; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Prompts(Settings):
    """Text put before queries and before documents."""

    query: str = ""
    document: str = ""


class Lora(Settings):
    """A low-rank adapter of rank r; defaults are those of CARE (arXiv 2604.10937).

    The update is multiplied by alpha / r; `targets` names linear layers, or is `all-linear`.
    """

    r: Positive = 32
    alpha: Positive = 64
    dropout: float = Field(0.0, ge=0, lt=1)
    targets: str | list[str] = "all-linear"


class Part(Settings):
    """A part of the queries, by a checksum of their texts: of `folds` one only, or all but one."""

    folds: int = Field(gt=1)
    only: int | None = Field(None, ge=0)
    without: int | None = Field(None, ge=0)

    @model_validator(mode="after")
    def _names_one(self) -> Self:
        named = [fold for fold in (self.only, self.without) if fold is not None]
        if len(named) != 1:
            raise ValueError("give either only or without")
        if named[0] >= self.folds:
            raise ValueError(f"there is no part {named[0]} of {self.folds}, counted from 0")
        return self


SOURCES = ("triples", "texts", "beir", "mined", "pairs")
# Keys that only some sources have.
_KEYS_OF = {
    "fields": ("texts", "pairs"),
    "split": ("beir",),
    "where": ("beir",),
    "role": ("texts",),
}


class DataEntry(Settings):
    """One source of examples or texts; exactly one of the first five says which."""

    triples: str | None = None  # JSONL with `query`, `positives`, `negatives`
    texts: str | None = None  # JSONL; each of its `fields` is a text
    beir: str | None = None  # a folder in BEIR's layout
    mined: str | None = None  # the name of a stage that mined triples
    pairs: str | None = None  # JSONL; its first field asks for its second: title and content, say
    fields: list[str] = Field(default_factory=list)  # that are read of `texts` and `pairs`
    split: str = "train"  # that is read of `beir`
    # Values that metadata of a document in `beir` must have.
    where: dict[str, str | int | bool] = Field(default_factory=dict)
    # The part of the queries that is read and, where only texts are read, of the documents that
    # answer them; of `beir` and `pairs`. Of `texts`, the part of these.
    part: Part | None = None
    # Which texts of `beir`, `pairs` and `triples` a stage reads that needs only texts.
    roles: list[Role] = Field(default=["query", "document"], min_length=1)
    role: Role = "query"  # as what the texts of `texts` are encoded
    # `sentence` for the first sentence of each text, where only texts are read.
    cut: Literal["sentence"] | None = None
    limit: Positive | None = None  # the most examples or texts that are read

    @model_validator(mode="after")
    def _names_one_source(self) -> Self:
        named = [name for name in SOURCES if getattr(self, name) is not None]
        if len(named) != 1:
            raise ValueError(f"give one of {', '.join(SOURCES)}")
        if named[0] == "pairs" and len(self.fields) not in (0, 2):
            raise ValueError("pairs needs two fields")
        for key, sources in _KEYS_OF.items():
            default = type(self).model_fields[key].get_default(call_default_factory=True)
            if named[0] not in sources and getattr(self, key) != default:
                raise ValueError(f"{key}: {named[0]} has none, only {' and '.join(sources)}")
        return self

    @property
    def source(self) -> str:
        """Which of the sources this entry names."""
        return next(name for name in SOURCES if getattr(self, name) is not None)


Data = Annotated[list[DataEntry], Field(min_length=1)]


class EncoderInit(Settings):
    """The initial checkpoint of an encoder; a table in docs/training.md says what each key does.

    Without `layers`, `vocabulary` or `dimension` all are kept, and without `frozen_layers` all
    are trained.
    """

    start: str | None = None
    revision: str | None = None
    pair: str | None = None
    side: Role = "document"
    layers: Layers | None = None
    frozen_layers: int | None = Field(None, ge=0)
    vocabulary: Data | None = None
    pooling: Pooling = "cls"
    prompts: Prompts = Prompts()
    max_length: int = Field(512, gt=2)
    dimension: Positive | None = None
    projection: Positive | None = None
    lora: Lora | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"

    @model_validator(mode="after")
    def _names_one_checkpoint(self) -> Self:
        if (self.start is None) == (self.pair is None):
            raise ValueError("give either start or pair")
        return self


class Dev(Settings):
    """On what nDCG@10 is measured during training; nothing else is chosen by it.

    Its queries are left out of all training data. `beir`, `where` and `part` are as in data.
    """

    beir: str
    split: str = "dev"
    where: dict[str, str | int | bool] = Field(default_factory=dict)
    part: Part | None = None
    queries: Positive | None = None  # the most that are measured; None for all
    documents: int | None = Field(None, ge=0)  # searched besides the judged ones; None for all
    start: bool = False  # whether each stage is measured before its first step too
    every: Positive | None = None  # steps between measurements; None for the stage's end alone
    batch: Positive = 32  # texts encoded at a time
