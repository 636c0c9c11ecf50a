"""Options of the benchmarks; each field is an option of a subcommand of `care bench`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from typer import Option

from core.choices import DEFAULT_INDEXES, DEFAULT_PAIR
from core.cpus import available_cpus
from loadtest.traffic import SAMPLE

RESULTS = Path("loadtest/results")
CACHE = Path("builds/bench")

Out = Annotated[Path, Option(metavar="FOLDER", help="Folder of results.")]
Cache = Annotated[
    Path, Option(metavar="FOLDER", help="Folder of vectors, indexes, corpora and builds.")
]


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """Options of `care bench service`."""

    indexes: Annotated[
        Path, Option(envvar="CARE_INDEXES", metavar="FOLDER", help="Folder of all indexes.")
    ] = DEFAULT_INDEXES
    index: Annotated[
        str, Option(envvar="CARE_INDEX", metavar="NAME", help="Name of the index.")
    ] = "medical-qa"
    pair: Annotated[
        str,
        Option(
            envvar="CARE_PAIR",
            metavar="PAIR",
            help="Trained or registered pair, or path of a pair's .toml file.",
        ),
    ] = DEFAULT_PAIR
    queries: Annotated[Path, Option(metavar="FILE", help="JSONL of queries with text.")] = SAMPLE
    out: Out = RESULTS
    weights: Annotated[
        Path, Option(metavar="FOLDER", help="Folder that `care bench weights` wrote.")
    ] = CACHE / "weights"
    sentence_transformers: Annotated[
        Path, Option(metavar="FILE", help="Python of the environment with sentence-transformers.")
    ] = Path(".venv-bench/bin/python")
    infinity: Annotated[
        Path, Option(metavar="FILE", help="Python of the environment with infinity-emb.")
    ] = Path(".venv-bench-infinity/bin/python")
    seconds: Annotated[int, Option(min=1, help="Seconds of one measurement.")] = 8
    rounds: Annotated[
        int, Option(min=1, help="Rounds; the compared systems alternate in each.")
    ] = 3
    connections: Annotated[
        int, Option(min=1, help="Concurrent clients that saturate the service.")
    ] = 64
    top_k: Annotated[int, Option(min=1, help="Number of hits per query.")] = 10
    only: Annotated[
        str, Option(metavar="NAMES", help="Scenarios to run, separated by commas (default: all).")
    ] = ""


@dataclass(frozen=True, slots=True)
class ScaleOptions:
    """Options of `care bench scale`."""

    vectors: Annotated[int, Option(min=1, help="Number of documents.")] = 100_000
    dimension: Annotated[int, Option(min=193, help="Dimension of a vector.")] = 768
    queries: Annotated[int, Option(min=1, help="Number of queries.")] = 1000
    threads: Annotated[int, Option(min=1, help="Threads of builds and batch searches.")] = 2
    links: Annotated[
        int, Option(min=1, help="M of HNSW graphs; the lowest level has twice as many links.")
    ] = 32
    construction: Annotated[int, Option(min=1, help="efConstruction of HNSW graphs.")] = 200
    seed: Annotated[int, Option(help="Seed of the vectors.")] = 0
    engines: Annotated[
        list[str],
        Option(
            "--engine",
            metavar="NAME",
            help="Only engines whose name contains this text. May be repeated.",
        ),
    ] = field(default_factory=list)
    factories: Annotated[
        list[str],
        Option(
            "--factory",
            metavar="FACTORY",
            help="FAISS factory string, instead of the engines. May be repeated.",
        ),
    ] = field(default_factory=list)
    cache: Cache = CACHE
    out: Out = RESULTS

    @property
    def folder(self) -> Path:
        """Folder for the vectors of these options and their indexes."""
        graph = f"M{self.links}-{self.construction}"
        return self.cache / f"{self.vectors}x{self.dimension}-seed{self.seed}-{graph}"


@dataclass(frozen=True, slots=True)
class StartOptions(ScaleOptions):
    """Options of `care bench start`; `threads` is CARE_THREADS."""

    vectors: Annotated[int, Option(min=1, help="Number of synthetic documents.")] = 1_000_000
    starts: Annotated[int, Option(min=1, help="Number of warm starts.")] = 5

    @property
    def index(self) -> Path:
        """The folder of the index."""
        return (self.cache / "indexes" / f"start-{self.vectors}").resolve()

    @property
    def pair(self) -> Path:
        """The TOML file of the pair."""
        return (self.cache / f"pair-{self.dimension}" / "pair.toml").resolve()


@dataclass(frozen=True, slots=True)
class BuildBenchOptions:
    """Options of `care bench build`."""

    documents: Annotated[
        list[int], Option(min=1, metavar="COUNT", help="Size of a corpus. May be repeated.")
    ] = field(default_factory=lambda: [100_000, 1_000_000])
    factory: Annotated[
        str | None, Option(help="FAISS factory (default: by number of vectors).")
    ] = None
    memory_gib: Annotated[float, Option(help="Memory for building inverted lists [GiB].")] = 0.25
    threads: Annotated[int, Option(min=1, help="Threads of FAISS and of the real encoder.")] = (
        available_cpus()
    )
    batch_size: Annotated[int, Option(min=1, help="Texts per batch of the null encoder.")] = 1024
    pair: Annotated[str, Option(help="Pair of the real encoder.")] = DEFAULT_PAIR
    real_documents: Annotated[
        int, Option(min=0, help="Documents for the real encoder; 0 skips it.")
    ] = 300
    cache: Cache = CACHE
    out: Out = RESULTS


@dataclass(frozen=True, slots=True)
class FilterBenchOptions:
    """Options of `care bench filters`."""

    rows: Annotated[int, Option(min=1, help="Number of rows.")] = 1_000_000
    fields: Annotated[int, Option(min=1, max=16, help="Fields of the filter.")] = 16
    values: Annotated[int, Option(min=1, max=100, help="Values of each field.")] = 100
    distinct: Annotated[
        list[int],
        Option(min=1, metavar="NUMBER", help="Distinct values of a field. May be repeated."),
    ] = field(default_factory=lambda: [100, 1000])
    seed: Annotated[int, Option(help="Seed of the values.")] = 0
    cache: Cache = CACHE
    out: Out = RESULTS


@dataclass(frozen=True, slots=True)
class HostileOptions:
    """Options of `care bench hostile`."""

    documents: Annotated[int, Option(min=1000, help="Documents of the attacked index.")] = 20_000
    pair: Annotated[str, Option(help="Pair of the service.")] = DEFAULT_PAIR
    hold: Annotated[
        float, Option(min=1, help="Seconds that clients hold connections without reading.")
    ] = 20.0
    only: Annotated[
        list[str],
        Option(metavar="TEXT", help="Attacks whose name contains this. May be repeated."),
    ] = field(default_factory=list)
    cache: Cache = CACHE
    out: Out = RESULTS
