"""Options of commands and of the functions behind them: one declaration for both, and for help."""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args, get_type_hints

import typer
from typer import Option

from core.choices import (
    DEFAULT_BUILDS,
    DEFAULT_INDEXES,
    DEFAULT_PAIR,
    DEFAULT_QUERY_CHARS,
    Backend,
    Dtype,
    StoreName,
)
from core.errors import CareError

if TYPE_CHECKING:
    from stores.registry import VectorStores

_Value = TypeVar("_Value")
# Options by panel of the help.
_index, _fields, _encoder, _ray, _server = (
    partial(Option, rich_help_panel=panel)
    for panel in ("Index", "Fields of tables", "Encoder", "Ray", "Embedding server")
)


def setting(variable: str, kind: Callable[[str], _Value], default: _Value) -> _Value:
    """Returns the value of an environment variable, or `default` if it is unset or empty."""
    text = os.environ.get(variable)
    return kind(text) if text else default


def _setting(variable: str, kind: Callable[[str], Any], default: Any) -> Any:
    return field(
        default_factory=lambda: setting(variable, kind, default), metadata={"default": default}
    )


def fraction(number: float | None) -> float | None:
    """Checks that an option is a number from 0 to 1."""
    if number is not None and not 0 <= number <= 1:
        raise typer.BadParameter(f"{number} is not a number from 0 to 1.")
    return number


def positive(number: float | None) -> float | None:
    """Checks that an option is a finite number above 0."""
    if number is not None and not 0 < number < math.inf:
        raise typer.BadParameter(f"{number} is not a number above 0.")
    return number


def not_negative(number: float | None) -> float | None:
    """Checks that an option is a finite number, 0 or above."""
    return number if number == 0 else positive(number)


def positive_numbers(text: str | None) -> str | None:
    """Checks that an option is a list of finite numbers above 0."""
    for part in text.split(",") if text else ():
        try:
            positive(float(part))
        except ValueError:
            raise typer.BadParameter(f"'{part}' is not a number above 0.") from None
    return text


def in_a_folder(path: Path | None) -> Path | None:
    """Checks that a file can be written, before a measurement whose result would be lost."""
    if path and not path.parent.is_dir():
        raise typer.BadParameter(f"the folder {path.parent} does not exist.")
    if path and path.exists() and not path.is_file():  # root could replace /dev/null
        raise typer.BadParameter(f"{path} is a folder, a device or a pipe.")
    return path


def several(values: Any, argument: str) -> Any:
    """Returns what an argument has; CareError if it is one text or mapping instead of several."""
    if isinstance(values, str | bytes | Mapping):
        message = f"{argument} is one {type(values).__name__}: give a list"
        raise CareError(message, code="not_a_list", argument=argument)
    return values


def file(help: str, *names: str, **more: Any) -> Any:
    """Returns an option whose value is the path of a file."""
    return Option(*names, metavar="FILE", help=help, **more)


def folder(help: str, **more: Any) -> Any:
    """Returns an option whose value is the path of a folder."""
    return Option(metavar="FOLDER", help=help, **more)


Indexes = Annotated[Path, folder("Folder of all indexes.", envvar="CARE_INDEXES")]
Builds = Annotated[Path, folder("Folder of resumable builds.", envvar="CARE_BUILDS")]
PairName = Annotated[
    str,
    Option(
        envvar="CARE_PAIR",
        metavar="PAIR",
        help="Trained or registered pair, or path of a pair's .toml file.",
    ),
]
Queries = Annotated[Path, file("JSONL with _id and text.")]
Qrels = Annotated[Path, file("TSV with query-id, corpus-id and score.")]
MilvusUri = Annotated[
    str | None,
    Option(
        envvar="CARE_MILVUS_URI",
        metavar="URI",
        help="Address of Milvus; its token is read from CARE_MILVUS_TOKEN.",
        rich_help_panel="Milvus",
    ),
]


def _documented(kind: type[Any]) -> type[Any]:
    """Adds the help of each field to the docstring of a class of options."""
    hints = get_type_hints(kind, include_extras=True)
    lines = [f"    {each.name}: {hints[each.name].__metadata__[0].help}" for each in fields(kind)]
    kind.__doc__ = "\n".join([cleandoc(str(kind.__doc__)), "", "Attributes:", *lines])
    return kind


@_documented
@dataclass(frozen=True, slots=True, kw_only=True)
class IndexOptions:
    """How an index is built: the options of `care index` and `care update`, by the same names.

    `pair`, `indexes`, `builds` and `milvus_uri` are by default the variables `CARE_PAIR`,
    `CARE_INDEXES`, `CARE_BUILDS` and `CARE_MILVUS_URI`; the token of Milvus is read from
    `CARE_MILVUS_TOKEN`. In an update, None in `factory`, `store`, `recall`, `backend`, `dtype`,
    `full_text`, `terms`, `lexical_weight` or `token_vectors` keeps what the active version has.
    """

    pair: PairName = _setting("CARE_PAIR", str, DEFAULT_PAIR)  # noqa: RUF009
    indexes: Indexes = _setting("CARE_INDEXES", Path, DEFAULT_INDEXES)  # noqa: RUF009
    builds: Builds = _setting("CARE_BUILDS", Path, DEFAULT_BUILDS)  # noqa: RUF009
    factory: Annotated[
        str | None,
        _index(
            metavar="FACTORY",
            help="Index type as a FAISS factory, such as Flat, HNSW32 or IVF1024,SQ8 (default: by "
            "the number of vectors).",
        ),
    ] = None
    store: Annotated[
        StoreName | None,
        _index(help="Where the index is kept: files, with FAISS, or Milvus (default: faiss)."),
    ] = None
    recall: Annotated[
        float | None,
        _index(
            help="recall@10 that the index must reach (default: 0.99, with a warning below).",
            callback=fraction,
        ),
    ] = None
    queries: Annotated[
        Path | None,
        _index(
            metavar="FILE",
            help="JSONL of held-out queries with text, to measure recall (default: first sentences "
            "of documents).",
        ),
    ] = None
    id_field: Annotated[
        str | None,
        _fields(
            metavar="NAME", help="Field of the id (default: by its name, else from file and row)."
        ),
    ] = None
    title_field: Annotated[
        str | None, _fields(metavar="NAME", help="Field of the title (default: by its name).")
    ] = None
    text_field: Annotated[
        str | None,
        _fields(
            metavar="NAME", help="Field of the text (default: by its name, else the longest one)."
        ),
    ] = None
    metadata_fields: Annotated[
        str | None,
        _fields(metavar="NAMES", help="Fields of the metadata, with commas (default: all others)."),
    ] = None
    ocr: Annotated[
        bool,
        _index(
            "--ocr",
            help="Recognize the text of scanned pages of PDF files; needs the extra ocr.",
        ),
    ] = False
    max_reject_rate: Annotated[
        float, _index(help="Largest share of records that may be rejected.", callback=fraction)
    ] = 0.01
    chunk_tokens: Annotated[
        int | None,
        _index(
            min=1,
            help="Split longer documents at sentence ends into chunks of at most this many tokens.",
        ),
    ] = None
    chunk_overlap: Annotated[
        int, _index(min=0, help="Most tokens that consecutive chunks share.")
    ] = 0
    threads: Annotated[
        int | None,
        _index(min=1, help="Threads of the encoder and of FAISS (default: all processors)."),
    ] = None
    memory_gib: Annotated[
        float,
        _index(
            help="Memory limit for building inverted lists [GiB]; larger lists are built in parts.",
            callback=positive,
        ),
    ] = 4.0
    backend: Annotated[
        Backend | None,
        _encoder(
            help="What runs the document encoder (default: auto, by the format of its weights)."
        ),
    ] = None
    dtype: Annotated[
        Dtype | None,
        _encoder(
            help="Data type that a checkpoint or OpenVINO computes in (default: auto: bfloat16 on "
            "GPUs, with OpenVINO the fastest one of the processor, else float32)."
        ),
    ] = None
    batch_size: Annotated[
        int | None, _encoder(min=1, help="Texts in a batch (default: vLLM 1024, others 32).")
    ] = None
    shard_size: Annotated[int, _encoder(min=1, help="Texts in a shard.")] = 4096
    replicas: Annotated[int, _encoder(min=1, help="Replicas of vLLM that share the texts.")] = 1
    tensor_parallel: Annotated[
        int, _encoder(min=1, help="GPUs that share the model of a replica.")
    ] = 1
    executor: Annotated[
        Literal["local", "ray"],
        _ray(help="Where document encoders run: this machine or a Ray cluster."),
    ] = "local"
    ray_address: Annotated[
        str, _ray(metavar="ADDRESS", help="Address of the Ray cluster: local, auto or host:port.")
    ] = "local"
    ray_actors: Annotated[int, _ray(min=1, help="Number of encoders on the Ray cluster.")] = 1
    base_url: Annotated[
        str | None,
        _server(
            metavar="URL",
            help="Address of a server with /v1/embeddings; its key is read from OPENAI_API_KEY.",
        ),
    ] = None
    model: Annotated[
        str | None,
        _server(metavar="NAME", help="The server's name of the model (default: the pair's)."),
    ] = None
    concurrency: Annotated[int, _server(min=1, help="Requests sent to the server at once.")] = 8
    truncate: Annotated[
        bool, _server("--truncate", help="Ask the server to truncate long texts (vLLM can).")
    ] = False
    full_text: Annotated[
        bool | None,
        _index(
            "--full-text/--no-full-text",
            help="Index the full text too, for lexical and hybrid search (default: yes).",
            show_default=False,
        ),
    ] = None
    terms: Annotated[
        Path | None,
        _index(
            metavar="LIST",
            help="Words that patients write and the clinical terms that they mean, for searches in "
            "full text: everyday, the list that is shipped, a TSV file, or none.",
        ),
    ] = None
    lexical_weight: Annotated[
        float | None,
        _index(
            help="Weight of full text in a hybrid search, which becomes the default mode; 0 keeps "
            "dense the default (default: the pair's).",
            callback=not_negative,
        ),
    ] = None
    token_vectors: Annotated[
        bool | None,
        _index(
            "--token-vectors/--no-token-vectors",
            help="Store token vectors of the documents too, with which searches can rerank their "
            "hits, if the pair computes them (default: no).",
            show_default=False,
        ),
    ] = None
    milvus_uri: MilvusUri = _setting("CARE_MILVUS_URI", str, None)  # noqa: RUF009

    def __post_init__(self) -> None:
        """Takes paths as text too; CareError if the command line would refuse a number."""
        for name, hint in get_type_hints(type(self), include_extras=True).items():
            value, option = getattr(self, name), hint.__metadata__[0]
            if isinstance(value, str) and Path in (hint.__origin__, *get_args(hint.__origin__)):
                object.__setattr__(self, name, Path(value))
            try:
                if option.min is not None and value is not None and value < option.min:
                    raise typer.BadParameter(f"{value} is less than {option.min}.")
                if option.callback:
                    option.callback(value)
            except (TypeError, typer.BadParameter) as error:
                raise CareError(f"{name}: {error}", code="invalid_option", option=name) from error


@_documented
@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """Where an index and its vectors lie; defaults as in `IndexOptions`."""

    indexes: Indexes = _setting("CARE_INDEXES", Path, DEFAULT_INDEXES)  # noqa: RUF009
    milvus_uri: MilvusUri = _setting("CARE_MILVUS_URI", str, None)  # noqa: RUF009


@_documented
@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationOptions:
    """How systems are compared: the options of `care evaluate`."""

    qrels: Qrels
    queries: Annotated[
        Path | None,
        file("JSONL with _id and text; without it no index is searched, and only --run is scored."),
    ] = None
    pairs: Annotated[
        list[str] | None,
        Option(
            "--pair",
            metavar="PAIR",
            help="Trained or registered pair, or path of a pair's .toml file, whose query encoder "
            "searches the index (default: CARE_PAIR, or care-mini). May be repeated: further pairs "
            "encode its documents too, and may be models of sentence-transformers, by a folder or "
            "OWNER/NAME.",
        ),
    ] = None
    runs: Annotated[
        list[Path] | None,
        file("TREC run of another system, also .gz. May be repeated.", "--run"),
    ] = None
    indexes: Indexes = _setting("CARE_INDEXES", Path, DEFAULT_INDEXES)  # noqa: RUF009
    weights: Annotated[
        str | None,
        Option(
            metavar="LIST",
            help="Also compare these weights of full text in a hybrid search: 0.05,0.1,0.2",
            callback=positive_numbers,
        ),
    ] = None
    rerank_url: Annotated[
        str | None,
        Option(
            metavar="URL",
            help="Server with /v1/rerank that ranks the hits again, in place of late interaction; "
            "with CARE_RERANK_KEY and CARE_RERANK_TRUNCATE_TOKENS.",
        ),
    ] = None
    rerank_model: Annotated[
        str,
        Option(metavar="NAME", help="The server's name of its model."),
    ] = ""
    output: Annotated[
        Path | None,
        file("Also write the result as JSON.", callback=in_a_folder),
    ] = None
    per_query: Annotated[
        Path | None,
        file(
            "Also write a TSV of all measures, by system and query.",
            callback=in_a_folder,
        ),
    ] = None
    save_runs: Annotated[
        Path | None, folder("Also write the TREC run of each system to SYSTEM.trec in this folder.")
    ] = None
    cache: Annotated[Path, folder("Folder of cached vectors of further pairs.")] = Path(
        "builds/embeddings"
    )
    max_query_chars: Annotated[
        int,
        Option(
            min=1,
            envvar="CARE_MAX_QUERY_CHARS",
            help="Most characters of a query; longer ones are an error.",
        ),
    ] = DEFAULT_QUERY_CHARS


@_documented
@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerabilityOptions:
    """Which questions are judged, and how: options of `care answerable`.

    Each file is a set, of which the share that is refused is reported. A question and its rewrites
    should have one id. `qrels` and `sizes` belong together: a sample of the index has relevant
    documents of the questions that it answers.
    """

    queries: Annotated[
        list[Path], file("JSONL of questions that the index answers; may be repeated.")
    ]
    unanswerable: Annotated[
        list[Path], file("JSONL of questions that it does not answer; may be repeated.")
    ]
    qrels: Annotated[
        list[Path] | None, file("Judgements of the questions, to draw samples; may be repeated.")
    ] = None
    sizes: Annotated[
        list[int] | None,
        Option(
            min=10,
            metavar="NUMBER",
            help="Also ask samples of the index of so many documents or chunks; may be repeated.",
        ),
    ] = None
    out: Annotated[
        Path | None,
        file(
            "Calibrate first, and write the pair with the result to this TOML file.",
            callback=in_a_folder,
        ),
    ] = None
    refused: Annotated[
        float,
        Option(min=0, max=0.5, help="Share of the answered questions that a calibration refuses."),
    ] = 0.02


def vector_stores(milvus_uri: str | None) -> "VectorStores":
    """Returns the stores of vectors, given the address of Milvus, if there is any."""
    from stores.registry import MilvusAddress, VectorStores

    token = os.environ.get("CARE_MILVUS_TOKEN", "")
    return VectorStores(MilvusAddress(milvus_uri, token) if milvus_uri else None)
