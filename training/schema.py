"""Schema of a recipe's encoders, data entries and development set."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from core.encoders import Pooling, Role

Precision = Literal["fp32", "bf16", "fp16"]
Positive = Annotated[int, Field(gt=0)]
# The range that NumPy's generators accept.
Seed = Annotated[int, Field(ge=0, lt=2**32)]
# Names of stages are part of folder names.
StageName = Annotated[str, Field(pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]*)?$")]
# Without layers, an encoder consists of its embeddings.
Layers = list[Annotated[int, Field(ge=0)]]


class Settings(BaseModel):
    """Base class of the parts of a recipe; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Prompts(Settings):
    """Text prepended to queries and to documents."""

    query: str = ""
    document: str = ""


class Lora(Settings):
    """A LoRA adapter (arXiv 2106.09685); the defaults are those of CARE (arXiv 2604.10937)."""

    r: Positive = 32  # rank
    alpha: Positive = 64  # the update is scaled by alpha / r
    dropout: float = Field(0.0, ge=0, lt=1)  # dropout of the adapter's input
    targets: str | list[str] = "all-linear"  # names of the linear layers to adapt, or `all-linear`


class Lookup(Settings):
    """A query encoder without layers, `models.encoders.lookup`, made from another encoder."""

    # First token vectors: `outputs`, the encoder's vector of each token alone; `embeddings`, its
    # token embeddings; or `random`.
    table: Literal["outputs", "embeddings", "random"] = "outputs"
    prompt: str = ""  # prompt of the encoder for `outputs`


class Part(Settings):
    """A subset of the queries: one of `folds` folds, or all folds except one.

    A checksum of the text assigns a query to its fold. Folds are numbered from 0.
    """

    folds: int = Field(gt=1)
    only: int | None = Field(None, ge=0)
    without: int | None = Field(None, ge=0)

    @model_validator(mode="after")
    def _check_fold(self) -> Self:
        named = [fold for fold in (self.only, self.without) if fold is not None]
        if len(named) != 1:
            raise ValueError("set either only or without")
        if named[0] >= self.folds:
            raise ValueError(f"fold {named[0]} does not exist: folds are 0 to {self.folds - 1}")
        return self


SOURCES = ("triples", "texts", "beir", "mined", "pairs", "terms")
# Keys that only some sources support.
_KEYS_OF = {
    "fields": ("texts", "pairs"),
    "split": ("beir",),
    "where": ("beir",),
    "role": ("texts",),
}


class DataEntry(Settings):
    """One source of examples or texts; exactly one of the first six keys must be set."""

    triples: str | None = None  # JSONL with `query`, `positives`, `negatives`
    # JSONL; each of its `fields` is a text. By default queries are the field `text`, and documents
    # the title with the text.
    texts: str | None = None
    beir: str | None = None  # a folder in BEIR's layout
    mined: str | None = None  # the name of an earlier stage of kind `mine`
    pairs: str | None = None  # JSONL; the first field is the query, the second its document
    # `everyday` or a TSV file: each word of the list is a query, its terms are the document.
    terms: str | None = None
    fields: list[str] = Field(default_factory=list)  # fields to read of `texts` and `pairs`
    split: str = "train"  # split of `beir`
    # Metadata values that the documents of `beir` must have.
    where: dict[str, str | int | bool] = Field(default_factory=dict)
    # Subset of the queries of `beir` and `pairs`, or of the texts of `texts`. In stages that read
    # single texts, only the positives and negatives of these queries are read as documents.
    part: Part | None = None
    # Roles of `beir`, `pairs` and `triples` to read, in stages that read single texts.
    roles: list[Role] = Field(default=["query", "document"], min_length=1)
    role: Role = "query"  # role of the texts of `texts`
    # `sentence` keeps the first sentence of each text, in stages that read single texts.
    cut: Literal["sentence"] | None = None
    limit: Positive | None = None  # maximum number of examples or texts

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        named = [name for name in SOURCES if getattr(self, name) is not None]
        if len(named) != 1:
            raise ValueError(f"set exactly one of {', '.join(SOURCES)}")
        if named[0] == "pairs" and len(self.fields) not in (0, 2):
            raise ValueError("fields: pairs needs two, for the query and its document")
        for key, sources in _KEYS_OF.items():
            default = type(self).model_fields[key].get_default(call_default_factory=True)
            if named[0] not in sources and getattr(self, key) != default:
                supported = " and ".join(sources)
                raise ValueError(f"{key}: not supported by {named[0]}, only by {supported}")
        return self

    @property
    def source(self) -> str:
        """The key of the source that is set."""
        return next(name for name in SOURCES if getattr(self, name) is not None)


Data = Annotated[list[DataEntry], Field(min_length=1)]


class EncoderInit(Settings):
    """The initial checkpoint of an encoder; docs/train-a-pair.md describes the keys.

    By default all layers, tokens and dimensions are kept, and all layers are trained.
    """

    start: str | None = None
    revision: str | None = None
    config: dict[str, Any] = Field(default_factory=dict)
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
    lookup: Lookup | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"

    @model_validator(mode="after")
    def _check_checkpoint(self) -> Self:
        if (self.start is None) == (self.pair is None):
            raise ValueError("set either start or pair")
        if self.lookup is not None:
            for key in ("lora", "frozen_layers"):
                if getattr(self, key) is not None:
                    raise ValueError(f"lookup and {key} cannot be combined: remove one of the two")
        return self


class Dev(Settings):
    """Development set on which nDCG@10 is measured during training.

    The measurements select nothing: training always uses the last weights. The queries are
    excluded from all training data. `beir`, `where` and `part` are those of `DataEntry`.
    """

    beir: str
    split: str = "dev"
    where: dict[str, str | int | bool] = Field(default_factory=dict)
    part: Part | None = None
    queries: Positive | None = None  # maximum number of queries; None for all
    documents: int | None = Field(None, ge=0)  # unjudged documents to search; None for all
    start: bool = False  # whether to measure before the first step of each stage
    every: Positive | None = None  # steps between measurements; None to measure at the end only
    batch: Positive = 32  # texts encoded at a time


class LateInteractionSettings(Settings):
    """Settings of the training of token projections; see the stage `LateInteraction`."""

    dimension: int = Field(64, gt=0, multiple_of=8)  # of the projected token vectors
    depth: Positive = 40  # candidates by cosine, and as many by BM25
    candidates: Positive = 16  # documents of a query in the loss
    # Whether candidates are drawn at random; otherwise the teacher's first are taken. Positives are
    # always candidates.
    sampled: bool = True
    weight: float = Field(1.0, gt=0)  # of MaxSim, in both scores
    bm25: float = Field(0.1, ge=0)  # weight of BM25 in the teacher's score
    labels: float = Field(1.0, ge=0, le=1)  # share of the positives in the target
    temperature: float = Field(0.02, gt=0)  # of the student's scores
    teacher_temperature: float = Field(0.02, gt=0)
    learning_rate: float = Field(2e-3, gt=0)  # peak rate of AdamW, with linear decay to zero
    epochs: Positive = 1
    batch: Positive = 32  # queries per step
    log_every: Positive = 10  # steps

    @model_validator(mode="after")
    def _check_candidates(self) -> Self:
        if self.candidates > self.depth:
            raise ValueError(f"candidates ({self.candidates}) must not exceed depth ({self.depth})")
        return self
