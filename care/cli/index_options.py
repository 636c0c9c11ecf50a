"""Options that `care index` and `care update` share; their defaults are those of `IndexOptions`."""

import inspect
import math
from collections.abc import Callable
from dataclasses import MISSING, fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Option

from care.cli.options import Builds, Indexes, MilvusUri, PairName
from care.options import IndexOptions
from core.choices import Backend, Dtype, StoreName

_INDEX, _ENCODER = "Index", "Encoder"
_RAY, _SERVER, _MILVUS = "Ray", "Embedding server", "Milvus"


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


class _Annotations:
    """Type and help of each field of `IndexOptions`."""

    pair: PairName
    indexes: Indexes
    builds: Builds
    factory: Annotated[
        str | None,
        Option(
            metavar="FACTORY",
            help="Index type as a FAISS factory, such as Flat, HNSW32 or IVF1024,SQ8 (default: by "
            "the number of vectors).",
            rich_help_panel=_INDEX,
        ),
    ]
    store: Annotated[
        StoreName | None,
        Option(help="Store of the vectors (default: faiss).", rich_help_panel=_INDEX),
    ]
    recall: Annotated[
        float | None,
        Option(
            help="recall@10 that the index must reach (default: 0.99, with a warning below).",
            callback=fraction,
            rich_help_panel=_INDEX,
        ),
    ]
    queries: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="JSONL of held-out queries with text, to measure recall (default: first sentences "
            "of documents).",
            rich_help_panel=_INDEX,
        ),
    ]
    max_reject_rate: Annotated[
        float,
        Option(
            help="Largest share of records that may be rejected.",
            callback=fraction,
            rich_help_panel=_INDEX,
        ),
    ]
    chunk_tokens: Annotated[
        int | None,
        Option(
            min=1,
            help="Split longer documents at sentence ends into chunks of at most this many tokens.",
            rich_help_panel=_INDEX,
        ),
    ]
    chunk_overlap: Annotated[
        int,
        Option(min=0, help="Most tokens that consecutive chunks share.", rich_help_panel=_INDEX),
    ]
    threads: Annotated[
        int | None,
        Option(
            min=1,
            help="Threads of the encoder and of FAISS (default: all processors).",
            rich_help_panel=_INDEX,
        ),
    ]
    memory_gib: Annotated[
        float,
        Option(
            help="Memory limit for building inverted lists [GiB]; larger lists are built in parts.",
            callback=positive,
            rich_help_panel=_INDEX,
        ),
    ]
    backend: Annotated[
        Backend | None,
        Option(
            help="What runs the document encoder (default: auto, by the format of its weights).",
            rich_help_panel=_ENCODER,
        ),
    ]
    dtype: Annotated[
        Dtype | None,
        Option(
            help="Data type that a checkpoint or OpenVINO computes in (default: auto: bfloat16 on "
            "GPUs, with OpenVINO the fastest one of the processor, else float32).",
            rich_help_panel=_ENCODER,
        ),
    ]
    batch_size: Annotated[
        int | None,
        Option(
            min=1,
            help="Texts in a batch (default: vLLM 1024, others 32).",
            rich_help_panel=_ENCODER,
        ),
    ]
    shard_size: Annotated[int, Option(min=1, help="Texts in a shard.", rich_help_panel=_ENCODER)]
    replicas: Annotated[
        int,
        Option(min=1, help="Replicas of vLLM that share the texts.", rich_help_panel=_ENCODER),
    ]
    tensor_parallel: Annotated[
        int,
        Option(min=1, help="GPUs that share the model of a replica.", rich_help_panel=_ENCODER),
    ]
    executor: Annotated[
        Literal["local", "ray"],
        Option(
            help="Where document encoders run: this machine or a Ray cluster.",
            rich_help_panel=_RAY,
        ),
    ]
    ray_address: Annotated[
        str,
        Option(
            metavar="ADDRESS",
            help="Address of the Ray cluster: local, auto or host:port.",
            rich_help_panel=_RAY,
        ),
    ]
    ray_actors: Annotated[
        int, Option(min=1, help="Number of encoders on the Ray cluster.", rich_help_panel=_RAY)
    ]
    base_url: Annotated[
        str | None,
        Option(
            metavar="URL",
            help="Address of a server with /v1/embeddings; its key is read from OPENAI_API_KEY.",
            rich_help_panel=_SERVER,
        ),
    ]
    model: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="The server's name of the model (default: the pair's).",
            rich_help_panel=_SERVER,
        ),
    ]
    concurrency: Annotated[
        int, Option(min=1, help="Requests sent to the server at once.", rich_help_panel=_SERVER)
    ]
    truncate: Annotated[
        bool,
        Option(
            "--truncate",
            help="Ask the server to truncate long texts (vLLM can).",
            rich_help_panel=_SERVER,
        ),
    ]
    full_text: Annotated[
        bool | None,
        Option(
            "--full-text/--no-full-text",
            help="Index the full text too, for lexical and hybrid search (default: yes).",
            show_default=False,
            rich_help_panel=_INDEX,
        ),
    ]
    terms: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="TSV of words that patients write and the clinical terms that they mean, for "
            "searches in full text; a file without rows removes the list.",
            rich_help_panel=_INDEX,
        ),
    ]
    lexical_weight: Annotated[
        float | None,
        Option(
            help="Weight of full text in a hybrid search, which becomes the default mode; 0 keeps "
            "dense the default (default: the pair's).",
            callback=not_negative,
            rich_help_panel=_INDEX,
        ),
    ]
    token_vectors: Annotated[
        bool | None,
        Option(
            "--token-vectors/--no-token-vectors",
            help="Store token vectors of the documents too, with which searches can rerank their "
            "hits, if the pair computes them (default: no).",
            show_default=False,
            rich_help_panel=_INDEX,
        ),
    ]
    milvus_uri: MilvusUri


def takes_index_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command an option for each field of `IndexOptions`.

    The command gets them together as its argument `options`.
    """
    defaults = {
        field.name: field.metadata["default"] if field.default is MISSING else field.default
        for field in fields(IndexOptions)
    }

    @wraps(command)
    def run(**given: Any) -> None:
        shared = {name: given.pop(name) for name in defaults}
        command(options=IndexOptions(**shared), **given)

    own = inspect.signature(command).parameters.values()
    parameters = [parameter for parameter in own if parameter.name != "options"] + [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=annotation
        )
        for name, annotation in _Annotations.__annotations__.items()
    ]
    # Typer reads both.
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run
