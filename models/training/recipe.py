"""Recipes: what is trained from what, in which stages, as YAML.

`extends` names a recipe that this one changes: mappings are merged, lists replaced. Stages are a
list in the base; in a recipe that extends it they may be a mapping from a stage's name to its
changes, to null for a stage that is left out, or to a new one that says which it comes `before`.
`${name}` stands for an entry of `variables`.
"""

from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from core.errors import TrainingError
from core.types import Pooling, Role

Precision = Literal["fp32", "bf16", "fp16"]
Positive = Annotated[int, Field(gt=0)]
# What numpy's generators take.
Seed = Annotated[int, Field(ge=0, lt=2**32)]
# Folders are named after stages.
StageName = Annotated[str, Field(pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]*)?$")]


class Strict(BaseModel):
    """A part of a recipe; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Prompts(Strict):
    """Text put before queries and before documents."""

    query: str = ""
    document: str = ""


class Lora(Strict):
    """A low-rank adapter; defaults are those of CARE (arXiv 2604.10937).

    Attributes:
        r: Rank.
        alpha: Scale; the update is multiplied by alpha / r.
        dropout: Dropout before the adapter.
        targets: Names of the linear layers, or `all-linear`.
    """

    r: Positive = 32
    alpha: Positive = 64
    dropout: float = Field(0.0, ge=0, lt=1)
    targets: str | list[str] = "all-linear"


class Part(Strict):
    """A part of the queries, chosen by a checksum of their texts.

    Attributes:
        folds: How many parts there are.
        only: The part that is taken.
        without: The part that is left out.
    """

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


class DataEntry(Strict):
    """One source of examples or texts; exactly one of the first four says where it lies.

    Attributes:
        triples: JSONL with `query`, `positives`, `negatives`.
        texts: JSONL, its `fields` are texts, each by itself.
        beir: A folder with `corpus.jsonl`, `SPLIT.queries.jsonl`, `SPLIT.qrels.tsv`.
        mined: The name of a stage that mined triples.
        pairs: JSONL, its first field asks for its second: title and content, for example.
        fields: The fields that are read of `texts` and `pairs`.
        split: The split that is read of `beir`.
        where: Values that metadata of a document in `beir` must have.
        part: The part of the queries that is read, and with it, where texts alone are read, the
            documents that answer them; of `beir` and `pairs`. Of `texts`, the part of these.
        roles: Which texts of `beir`, `pairs` and `triples` a stage reads that needs texts alone.
        role: As what the texts of `texts` are encoded.
        cut: `sentence` for the first sentence of each text alone; where texts alone are read.
        limit: The most examples or texts that are read.
    """

    triples: str | None = None
    texts: str | None = None
    beir: str | None = None
    mined: str | None = None
    pairs: str | None = None
    fields: list[str] = Field(default_factory=list)
    split: str = "train"
    where: dict[str, str | int | bool] = Field(default_factory=dict)
    part: Part | None = None
    roles: list[Role] = Field(default=["query", "document"], min_length=1)
    role: Role = "query"
    cut: Literal["sentence"] | None = None
    limit: Positive | None = None

    @model_validator(mode="after")
    def _names_one_source(self) -> Self:
        named = [name for name in SOURCES if getattr(self, name) is not None]
        if len(named) != 1:
            raise ValueError(f"give one of {', '.join(SOURCES)}")
        if named[0] == "pairs" and len(self.fields) not in (0, 2):
            raise ValueError("pairs needs two fields")
        for key, sources in _ONLY.items():
            default = type(self).model_fields[key].get_default(call_default_factory=True)
            if named[0] not in sources and getattr(self, key) != default:
                raise ValueError(f"{key}: {named[0]} has none, only {' and '.join(sources)}")
        return self

    @property
    def source(self) -> str:
        """Which of the sources this entry names."""
        return next(name for name in SOURCES if getattr(self, name) is not None)


SOURCES = ("triples", "texts", "beir", "mined", "pairs")
# Keys that some sources alone are read by: elsewhere they would be passed over in silence.
_ONLY = {"fields": ("texts", "pairs"), "split": ("beir",), "where": ("beir",), "role": ("texts",)}
Data = Annotated[list[DataEntry], Field(min_length=1)]


class EncoderStart(Strict):
    """Where one encoder begins.

    Attributes:
        start: A checkpoint folder, a model on the hub, or `embedded`: the encoder that
            care-mini is made from (`models.conversion`).
        revision: The revision on the hub.
        pair: Instead of `start`: a registered pair, or the path of its TOML file.
        side: The side of that pair.
        layers: Indexes of the transformer layers that are kept, from 0; None for all.
        frozen_layers: How many of these, from the first, stay as they are whatever trains the
            encoder, and the embeddings with them; None to train all.
        vocabulary: Texts whose tokens are kept, with single characters and special tokens; None
            for all tokens.
        pooling: How token vectors become one.
        prompts: Text put before queries and documents.
        max_length: Tokens that the encoder reads, special tokens included.
        dimension: Dimensions kept after truncation; None for all.
        projection: Width of a linear layer behind the pooling, or None for no such layer.
        lora: The adapter that is trained in place of the weights.
        dtype: In which the weights are held.
    """

    start: str | None = None
    revision: str | None = None
    pair: str | None = None
    side: Role = "document"
    layers: list[Annotated[int, Field(ge=0)]] | None = Field(None, min_length=1)
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
    def _has_one_start(self) -> Self:
        if (self.start is None) == (self.pair is None):
            raise ValueError("give either start or pair")
        return self


class Dev(Strict):
    """On what nDCG@10 is measured while training goes on; nothing else is chosen by it.

    A query of it is never trained on, wherever else its text occurs.

    Attributes:
        beir: The folder.
        split: Its split.
        where: Values that metadata of a document must have.
        part: The part of the queries that is asked.
        queries: The most queries that are asked; None for all.
        documents: How many documents are searched besides the judged ones; None for all.
        start: Whether each stage is measured before its first step too.
        every: Steps between measurements; None for the stage's end alone.
        batch: Texts encoded at a time.
    """

    beir: str
    split: str = "dev"
    where: dict[str, str | int | bool] = Field(default_factory=dict)
    part: Part | None = None
    queries: Positive | None = None
    documents: int | None = Field(None, ge=0)
    start: bool = False
    every: Positive | None = None
    batch: Positive = 32


class Fit(Strict):
    """What all stages share that train; defaults are those of CARE (arXiv 2604.10937).

    Attributes:
        name: Unique in the recipe; the kind if none is given.
        data: What is read.
        learning_rate: Of AdamW, falling linearly to zero.
        warmup: Part of the steps over which the learning rate rises.
        batch: Examples of a step, on all devices together.
        mini_batch: Texts that are encoded at a time; None for all of a batch. With it the
            activations are computed anew for the gradients (GradCache, arXiv 2101.06983).
        epochs: Passes over the data.
        max_steps: The most steps, or None.
        weight_decay: Of AdamW.
        max_grad_norm: Gradients are cut to this norm.
        precision: Type of the arithmetic; weights stay as they are.
        gradient_checkpointing: Whether layers compute their activations anew for the gradients.
        dropout: Replaces the dropout of the checkpoint, or None to leave it.
        group_by_length: Whether a batch holds texts of similar length.
        checkpoint_every: Steps between checkpoints.
        log_every: Steps between records of the loss.
        trainer: More arguments of transformers.TrainingArguments: `fsdp`, `deepspeed`, …
        seed: In place of the run's: runs with several seeds then share the stage.
    """

    name: StageName = ""
    data: Data
    seed: Seed | None = None
    learning_rate: float = Field(1e-4, gt=0)
    warmup: float = Field(0.05, ge=0, lt=1)
    batch: Positive = 640
    mini_batch: Positive | None = None
    epochs: Positive = 1
    max_steps: Positive | None = None
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    precision: Precision = "fp32"
    gradient_checkpointing: bool = False
    dropout: float | None = Field(None, ge=0, lt=1)
    group_by_length: bool = True
    checkpoint_every: Positive = 500
    log_every: Positive = 10
    trainer: dict[str, Any] = Field(default_factory=dict)


class RetroMae(Fit):
    """RetroMAE (arXiv 2205.12035): an encoder's vector lets a weak decoder rebuild the text.

    Attributes:
        side: The encoder that is trained.
        encoder_mask: Part of the tokens that are masked for the encoder.
        decoder_mask: Part of the tokens that each token of the decoder cannot see.
    """

    kind: Literal["retromae"]
    side: Role = "query"
    encoder_mask: float = Field(0.3, gt=0, lt=1)
    decoder_mask: float = Field(0.5, gt=0, lt=1)
    learning_rate: float = Field(2e-4, gt=0)
    warmup: float = Field(0.0, ge=0, lt=1)
    batch: Positive = 384
    epochs: Positive = 3

    @model_validator(mode="after")
    def _has_no_mini_batch(self) -> Self:
        if self.mini_batch is not None:
            raise ValueError("mini_batch: set trainer.gradient_accumulation_steps instead")
        return self


class Unsupervised(Fit):
    """InfoNCE on pairs of title and content, with a temperature that is learned.

    Attributes:
        side: The encoder that is trained; both texts of a pair go through it.
        temperature: Where the temperature begins.
    """

    kind: Literal["unsupervised"]
    side: Role = "query"
    temperature: float = Field(0.05, gt=0)
    batch: Positive = 19_200
    epochs: Positive = 3


class Contrastive(Fit):
    """Supervised InfoNCE of one encoder on both sides.

    Attributes:
        side: The encoder that is trained.
        temperature: Of the InfoNCE.
        negatives: Hard negatives of each example, drawn anew in each epoch.
        dimensions: Nested Matryoshka dimensions (arXiv 2205.13147) over which the loss is
            averaged; none for the encoder's dimension alone.
    """

    kind: Literal["contrastive"]
    side: Role = "query"
    temperature: float = Field(0.02, gt=0)
    negatives: int = Field(1, ge=0)
    dimensions: list[Positive] = Field(default_factory=list)
    epochs: Positive = 2


class Teacher(Strict):
    """Vectors of texts, computed once by the frozen encoder and stored as shards.

    Attributes:
        name: Unique in the recipe.
        data: The texts.
        side: The encoder.
        prompts: In place of the encoder's own.
        precision: Type of the arithmetic.
        batch: Texts encoded at a time.
        shard: Rows of a shard.
    """

    kind: Literal["teacher"]
    name: StageName = ""
    data: Data
    side: Role = "document"
    prompts: Prompts | None = None
    precision: Precision = "fp32"
    batch: Positive = 32
    shard: Positive = 65_536


class Mine(Strict):
    """Hard negatives: documents that the encoder ranks high and nobody judged relevant.

    Attributes:
        name: Unique in the recipe.
        data: Queries and their positives; the documents of these entries are searched.
        side: The encoder, used on both sides.
        first: The first rank that is taken, from 1, positives not counted.
        last: The last rank that is taken.
        negatives: The most negatives of a query.
        margin: A negative's score is at most this part of the lowest score of a positive.
        precision: Type of the arithmetic.
        batch: Texts encoded at a time.
    """

    kind: Literal["mine"]
    name: StageName = ""
    data: Data
    side: Role = "document"
    first: Positive = 10
    last: Positive = 100
    negatives: Positive = 7
    margin: float = Field(0.95, gt=0)
    precision: Precision = "fp32"
    batch: Positive = 32

    @model_validator(mode="after")
    def _has_a_window(self) -> Self:
        if self.last < self.first:
            raise ValueError(f"last ({self.last}) lies before first ({self.first})")
        return self


class Align(Fit):
    """Stage I: the query encoder learns the vectors that the frozen document encoder gives.

    Each text is its own positive: L = contrastive · InfoNCE + mse · ‖E_Q(x) − E_D(x)‖². With
    `kl` alone it is KALE's alignment (arXiv 2304.01016), with `mse` alone that of Wang and Lyu
    (arXiv 2306.11550) and of ScalingNote's query tower (arXiv 2411.15766).

    Attributes:
        teacher: The teacher stage whose vectors are read; "" for the last before this one.
        vectors: Instead: a folder of vectors that an earlier run computed.
        data: The part of the teacher's texts that is read; empty for all of them.
        contrastive: Weight λ₁ of the InfoNCE.
        mse: Weight λ₂ of the squared distance, summed over dimensions.
        kl: Weight of the KL divergence of the vectors' softmax over dimensions.
        temperature: Of the InfoNCE and of that softmax.
    """

    kind: Literal["align"]
    data: list[DataEntry] = Field(default_factory=list)
    teacher: str = ""
    vectors: str | None = None
    contrastive: float = Field(1.0, ge=0)
    mse: float = Field(1.0, ge=0)
    kl: float = Field(0.0, ge=0)
    temperature: float = Field(0.02, gt=0)
    batch: Positive = 2_560

    @model_validator(mode="after")
    def _has_a_loss(self) -> Self:
        if not self.contrastive and not self.mse and not self.kl:
            raise ValueError("contrastive, mse and kl are all 0: there is no loss")
        return self

    @model_validator(mode="after")
    def _names_its_texts(self) -> Self:
        if self.vectors and not self.data:
            raise ValueError("vectors: name their texts as data")
        return self


class Derive(Strict):
    """An encoder cut from one that an earlier stage has trained.

    KALE and Wang and Lyu begin with layers of the trained document encoder (arXiv 2304.01016,
    2306.11550); a linear layer behind a trained query encoder is what HotelMatch-LLM puts
    between a small and a large encoder (ACL 2025, long paper 30).

    Attributes:
        name: Unique in the recipe.
        side: The encoder that comes out; prompts, pooling and length stay as they were.
        source: The encoder that it is cut from.
        layers: As for the start of an encoder.
        projection: As for the start of an encoder.
    """

    kind: Literal["derive"]
    name: StageName = ""
    side: Role = "query"
    source: Role = "document"
    layers: list[Annotated[int, Field(ge=0)]] | None = Field(None, min_length=1)
    projection: Positive | None = None

    @model_validator(mode="after")
    def _changes_something(self) -> Self:
        if self.layers is None and self.projection is None:
            raise ValueError("name layers or projection")
        return self

    @property
    def data(self) -> list[DataEntry]:
        """No data is read."""
        return []


class Joint(Fit):
    """Stage II: query and document encoder are trained together, by InfoNCE alone.

    Attributes:
        train: The sides that are trained; the other is frozen.
        temperature: Of the InfoNCE.
        negatives: Hard negatives of each example, drawn anew in each epoch.
        all_documents: Whether all documents of the data are in each batch, in place of those of
            its examples: where the document encoder is frozen, their vectors cost nothing.
    """

    kind: Literal["joint"]
    train: list[Role] = Field(default=["query", "document"], min_length=1)
    temperature: float = Field(0.02, gt=0)
    negatives: int = Field(1, ge=0)
    all_documents: bool = False

    @model_validator(mode="after")
    def _has_vectors_of_all_documents(self) -> Self:
        if self.all_documents and "document" in self.train:
            raise ValueError("all_documents: only where the document encoder is not trained")
        return self


class Distill(Fit):
    """Distillation: KL divergence from a teacher's scores, and InfoNCE.

    Attributes:
        side: The encoder that is trained, on both sides; None for query and document encoder.
        teacher: The teacher stage whose vectors are read; "" for the last before this one.
        kl: Weight of the divergence.
        contrastive: Weight of the InfoNCE.
        temperature: Of the student's scores, in both losses.
        teacher_temperature: Of the teacher's scores.
        negatives: Hard negatives of each example.
    """

    kind: Literal["distill"]
    side: Role | None = "query"
    teacher: str = ""
    kl: float = Field(1.0, ge=0)
    contrastive: float = Field(1.0, ge=0)
    temperature: float = Field(0.02, gt=0)
    teacher_temperature: float = Field(0.02, gt=0)
    negatives: int = Field(1, ge=0)

    @model_validator(mode="after")
    def _has_a_loss(self) -> Self:
        if not self.kl and not self.contrastive:
            raise ValueError("kl and contrastive are both 0: there is no loss")
        return self


Stage = Annotated[
    RetroMae | Unsupervised | Contrastive | Derive | Teacher | Mine | Align | Joint | Distill,
    Field(discriminator="kind"),
]


class Recipe(Strict):
    """A whole recipe.

    Attributes:
        name: Of the pair that comes out.
        description: One sentence.
        seeds: A run is made with each.
        variables: What `${name}` stands for in any text of the recipe.
        query: Where the query encoder begins.
        document: Where the document encoder begins.
        dev: On what the stages are measured.
        stages: In their order.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    description: str = ""
    seeds: list[Seed] = Field(default=[0], min_length=1)
    variables: dict[str, str] = Field(default_factory=dict)
    query: EncoderStart | None = None
    document: EncoderStart | None = None
    dev: Dev | None = None
    stages: list[Stage] = Field(min_length=1)

    @model_validator(mode="after")
    def _stages_have_names(self) -> Self:
        names = [stage_name(stage) for stage in self.stages]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two stages are named '{twice[0]}': give them names")
        return self


def stage_name(stage: Any) -> str:
    """Returns the name of a stage: its own, or else its kind."""
    return str(stage.name or stage.kind)


def load_recipe(path: Path, changes: Sequence[str] = ()) -> Recipe:
    """Loads a recipe, what it extends, and changes of a command line.

    Args:
        path: The YAML file.
        changes: `key=value`, the key with dots (`stages.align.epochs=2`), the value in YAML.

    Raises:
        TrainingError: If a file cannot be read, or a key is unknown or wrong; it names the file
            and the key.
    """
    data = _load(path, ())
    for change in changes:
        data = _merge(data, _as_mapping(change), "--set")
    variables = data.get("variables")
    try:
        return Recipe.model_validate(
            _substitute(data, variables if isinstance(variables, dict) else {}, path)
        )
    except ValidationError as error:
        errors = error.errors(include_url=False)
        unknown = [found for found in errors if found["type"] == "extra_forbidden"]
        # A key that is missing may be one that was misspelt.
        first = (unknown or errors)[0]
        reason = "unknown key" if unknown else first["msg"]
        raise TrainingError(f"{path}: {_key(first['loc'], data)}: {reason}") from error


def _key(location: Sequence[int | str], data: Any) -> str:
    """Returns a key as it is written, with the names of stages in place of their numbers."""
    keys: list[str] = []
    for part in location:
        if isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
            named = isinstance(data, dict) and (data.get("name") or data.get("kind"))
            keys.append(str(named or part))
        elif isinstance(data, dict) and part in data:
            data = data[part]
            keys.append(str(part))
        elif not (isinstance(data, dict) and part == data.get("kind")):
            keys.append(str(part))
    return ".".join(keys) or "recipe"


def _load(path: Path, above: tuple[Path, ...]) -> dict[str, Any]:
    if path.resolve() in above:
        raise TrainingError(f"{path}: extends: the recipe extends itself")
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TrainingError(f"{path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise TrainingError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise TrainingError(f"{path} is not a mapping of keys")
    base = data.pop("extends", None)
    if base is None:
        return data
    if not isinstance(base, str):
        raise TrainingError(f"{path}: extends: name one file")
    return _merge(_load(path.parent / base, (*above, path.resolve())), data, str(path))


def _as_mapping(change: str) -> dict[str, Any]:
    key, equals, value = change.partition("=")
    if not equals or not key:
        raise TrainingError(f"--set {change}: write key=value")
    try:
        nested: Any = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise TrainingError(f"--set {key}: the value is not valid YAML") from error
    for part in reversed(key.split(".")):
        nested = {part: nested}
    return dict(nested)


def _merge(base: dict[str, Any], changes: dict[str, Any], source: str) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        before = base.get(key)
        if isinstance(value, dict) and isinstance(before, dict):
            merged[key] = _merge(before, value, source)
        elif isinstance(value, dict) and isinstance(before, list):
            merged[key] = _merge_list(before, value, f"{source}: {key}", source)
        else:
            merged[key] = value
    return merged


def _merge_list(
    base: list[Any], changes: dict[str, Any], where: str, source: str
) -> list[dict[str, Any]]:
    """Changes entries of a list by their names or, if they have none, by their numbers."""
    merged: dict[str, Any] = {}
    for number, entry in enumerate(base):
        named = isinstance(entry, dict) and (entry.get("name") or entry.get("kind"))
        merged[str(named or number)] = entry
    for name, change in changes.items():
        if str(name) not in merged:
            merged = _insert(merged, str(name), change, f"{where}.{name}")
            continue
        if change is None:
            del merged[str(name)]
        elif isinstance(change, dict) and isinstance(merged[str(name)], dict):
            merged[str(name)] = _merge(merged[str(name)], change, source)
        else:
            merged[str(name)] = change
    return list(merged.values())


def _insert(entries: dict[str, Any], name: str, new: Any, where: str) -> dict[str, Any]:
    if not isinstance(new, dict) or "before" not in new:
        raise TrainingError(f"{where}: there is none of that name to change")
    new = {"name": name} | new
    next_name = str(new.pop("before"))
    if next_name not in entries:
        raise TrainingError(f"{where}.before: there is no '{next_name}'")
    inserted = {}
    for key, entry in entries.items():
        if key == next_name:
            inserted[name] = new
        inserted[key] = entry
    return inserted


def _substitute(value: Any, variables: dict[str, str], path: Path) -> Any:
    if isinstance(value, str):
        try:
            return Template(value).substitute(variables)
        except (KeyError, ValueError) as error:
            raise TrainingError(f"{path}: '{value}' names an unknown variable") from error
    if isinstance(value, dict):
        return {key: _substitute(item, variables, path) for key, item in value.items()}
    if isinstance(value, list):
        return [_substitute(item, variables, path) for item in value]
    return value
