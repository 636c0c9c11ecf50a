"""Pairs and BM25 on the tasks: mteb encodes and searches, ir-measures scores."""

import hashlib
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import mteb
from datasets import Dataset
from mteb.abstasks import AbsTaskRetrieval
from mteb.abstasks.sts import AbsTaskSTS
from mteb.abstasks.task_metadata import TaskMetadata
from mteb.models.abs_encoder import AbsEncoder
from mteb.models.model_meta import ModelMeta, ScoringFunction
from mteb.types import PromptType

from core.encoders import Encoder, EncoderSpec, Pair, Role
from core.errors import CareError
from core.files import write_text
from core.progress import write_above
from core.provenance import library_versions
from core.scratch import temporary_folder
from core.types import Document, FloatArray
from evaluation.bm25 import SYSTEMS, Bm25Index
from evaluation.cmedteb.results import TaskScore, markdown_table, read_scores, run_path, write_score
from evaluation.cmedteb.tasks import PairData, RankingData, Task, TaskData
from evaluation.metrics import MAP, MAP_10, NDCG_10, score_queries, write_run
from evaluation.statistics import mean_interval, pearson_interval
from models.encoders.cached import encode_cached
from models.encoders.factory import load_encoder
from models.pairs import load_pair

MEASURES = {"nDCG@10": NDCG_10, "MAP@10": MAP_10, "MAP": MAP}
# mteb's names of kinds and measures.
_TYPES = {"retrieval": "Retrieval", "reranking": "Reranking", "sts": "STS"}
_MAIN_SCORES = {
    "nDCG@10": "ndcg_at_10",
    "MAP@10": "map_at_10",
    "MAP": "map_at_1000",
    "Pearson": "cosine_pearson",
}
_INSTRUCTION = re.compile(r"(?<=Instruct: )[^\n]*(?=\n)")

Load = Callable[[EncoderSpec, Path], Encoder]


def with_instruction(spec: EncoderSpec, instruction: str) -> EncoderSpec:
    r"""Returns the spec with the task's instruction in its prompt.

    Only a prompt of the form "Instruct: …\nQuery:" has an instruction; others are kept.
    """
    prompt = _INSTRUCTION.sub(lambda found: instruction or found[0], spec.prompt)
    return spec.model_copy(update={"prompt": prompt})


def takes_instruction(spec: EncoderSpec) -> bool:
    return _INSTRUCTION.search(spec.prompt) is not None


class PairModel(AbsEncoder):
    """A pair as a model of mteb.

    The document side encodes documents, the query side encodes all other texts. Vectors are cached
    in the folder `cache`; `load` loads one side. `name` is by default that of the pair.
    """

    def __init__(
        self,
        pair: Pair,
        cache: Path,
        *,
        batch_size: int = 32,
        load: Load = load_encoder,
        name: str = "",
    ) -> None:
        self.name = name or pair.name
        self.pair = pair
        self._cache = cache
        self._batch_size = batch_size
        self._load = load
        self._loaded: dict[Role, Encoder] = {}
        self.mteb_model_meta = _meta(pair.name, pair.query.dimension)

    def encode(
        self, inputs: Any, *, task_metadata: Any, prompt_type: PromptType | None = None, **_: Any
    ) -> FloatArray:
        """Encodes the texts of a data loader; returns float32 [n, dimension]."""
        texts = [text for batch in inputs for text in batch["text"]]
        if prompt_type == PromptType.document:
            spec = self.pair.document
        else:
            prompt = task_metadata.prompt
            instruction = prompt.get("query", "") if isinstance(prompt, dict) else prompt or ""
            spec = with_instruction(self.pair.query, instruction)
        return self.vectors(spec, texts)

    def vectors(self, spec: EncoderSpec, texts: Sequence[str]) -> FloatArray:
        """Returns the vectors of normalised texts, encoded or from the cache.

        They are float32 [n, dimension], of unit norm. `spec` is one of the pair's specifications,
        perhaps with an instruction.
        """
        return encode_cached(
            lambda: self._encoder(spec),
            spec,
            texts,
            self._cache,
            batch_size=self._batch_size,
            label=f"{self.pair.name} {spec.role}",
        )

    def _encoder(self, spec: EncoderSpec) -> Encoder:
        # Only one encoder of each role stays loaded: a large one fills a GPU.
        encoder = self._loaded.pop(spec.role, None)
        if encoder is None or encoder.spec != spec:
            del encoder
            encoder = self._load(spec, self.pair.folder)
        self._loaded[spec.role] = encoder
        return encoder


class Bm25Model:
    """BM25 as a model of mteb: a baseline of all tasks but STS.

    `name` is one of `evaluation.bm25.SYSTEMS`.
    """

    def __init__(self, name: str = "bm25") -> None:
        self.name = name
        self.analyzer = SYSTEMS[name]
        self.mteb_model_meta = _meta(name, None)

    def index(self, corpus: Any, **_: Any) -> None:
        documents = (Document(row["id"], row["text"]) for row in corpus)
        self._index = Bm25Index(documents, self.analyzer)

    def search(
        self, queries: Any, *, top_k: int, top_ranked: Any = None, **_: Any
    ) -> dict[str, dict[str, float]]:
        """Ranks the corpus, or the candidates of each query."""
        ids, texts = queries["id"], queries["text"]
        if top_ranked:
            queries_by_id = zip(ids, texts, strict=True)
            return {id_: self._index.score(text, top_ranked[id_]) for id_, text in queries_by_id}
        return dict(zip(ids, self._index.search(texts, top_k), strict=True))


System = PairModel | Bm25Model


class RankingTask(AbsTaskRetrieval):
    """Retrieval, or reranking of given candidates, as a task of mteb."""

    def __init__(self, known: Task, data: RankingData) -> None:
        self.metadata = _metadata(known)
        super().__init__()
        split = {
            "corpus": _texts(data.corpus),
            "queries": _texts(data.queries),
            "relevant_docs": data.qrels,
            "top_ranked": data.candidates,
        }
        self.dataset = cast("Any", {"default": {"test": split}})
        self.data_loaded = True


class StsTask(AbsTaskSTS):
    """Similarity of two texts as a task of mteb."""

    min_score = 0
    max_score = 1

    def __init__(self, known: Task, data: PairData) -> None:
        self.metadata = _metadata(known)
        super().__init__()
        columns = {"sentence1": data.first, "sentence2": data.second, "score": data.label}
        self.dataset = cast("Any", {"default": {"test": Dataset.from_dict(columns)}})
        self.data_loaded = True


def evaluate_task(system: System, known: Task, data: TaskData, out: Path) -> TaskScore | None:
    """Runs a system on a task and writes the run file and the score into its folder in `out`.

    Returns the score, or None if the system does not support the task (BM25 and STS). CareError if
    the score is not defined: no query has a relevant document, or the system gives all pairs of STS
    the same similarity.
    """
    labels: list[float] | None = None
    if isinstance(data, PairData):
        if isinstance(system, Bm25Model):
            return None
        similarities = _predict(system, StsTask(known, data))["cosine_scores"]
        if len(set(similarities)) < 2:
            message = (
                f"'{system.name}' gives all pairs of '{known.name}' the same similarity: "
                "Pearson's r is not defined"
            )
            code = "equal_similarities"
            raise CareError(message, code=code, system=system.name, task=known.name)
        labels = data.label
        interval = pearson_interval(labels, similarities)
        items = {str(number): value for number, value in enumerate(similarities)}
        contents: list[Any] = [data.first, data.second, labels]
    else:
        if not any(grade > 0 for grades in data.qrels.values() for grade in grades.values()):
            message = f"no query of '{known.name}' has a relevant document: check its judgements"
            raise CareError(message, code="no_relevant_document", task=known.name)
        run = _predict(system, RankingTask(known, data))
        items = score_queries(MEASURES[known.measure], data.qrels, run)
        interval = mean_interval(list(items.values()))
        contents = [data.corpus, data.queries, data.qrels, data.candidates]
        write_run(run_path(out, system.name, known.name), run, system.name)
    score = TaskScore(
        system=system.name,
        task=known.name,
        measure=known.measure,
        **asdict(interval),
        items=items,
        labels=labels,
        data_sha256=hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest(),
        libraries=library_versions(),
    )
    write_score(out, score)
    return score


def _predict(system: System, task: RankingTask | StsTask) -> Any:
    logging.getLogger("mteb").setLevel(logging.WARNING)
    with temporary_folder() as folder:
        mteb.evaluate(
            cast("Any", system),
            task,
            co2_tracker=False,
            cache=None,
            encode_kwargs={"batch_size": 256, "show_progress_bar": False},
            prediction_folder=folder,
            show_progress_bar=False,
        )
        file = folder / task.prediction_file_name
        return json.loads(file.read_text("utf-8"))["default"]["test"]


def _texts(texts: dict[str, str]) -> Dataset:
    return Dataset.from_dict({"id": list(texts), "text": list(texts.values())})


def _metadata(known: Task) -> TaskMetadata:
    return TaskMetadata(
        name=known.name,
        description=f"{known.column} of CMedTEB",
        prompt=known.instruction,
        dataset={"path": "local", "revision": "1"},
        type=_TYPES[known.kind],
        category="t2t",
        modalities=["text"],
        eval_splits=["test"],
        eval_langs=["cmn-Hans"],
        main_score=_MAIN_SCORES[known.measure],
    )


def _meta(name: str, dimension: int | None) -> ModelMeta:
    return ModelMeta.create_empty(
        {
            "name": f"care/{name}",
            "revision": "1",
            "languages": ["cmn-Hans"],
            "embed_dim": dimension,
            "similarity_fn_name": ScoringFunction.COSINE,
        }
    )


TABLE = "table.md"


def load_systems(
    names: Sequence[str],
    cache: Path,
    *,
    instructions: Path | None = None,
    batch_size: int = 32,
    load: Load = load_encoder,
) -> list[System]:
    """Returns the systems with these names.

    With the instructions of a file, a pair that takes instructions is the system PAIR+FILE, so
    that its scores are kept beside those with other instructions.

    Args:
        names: Registered pairs, paths of pairs' TOML files, or names of `evaluation.bm25.SYSTEMS`.
        cache: Folder in which the vectors of pairs are kept.
        instructions: File of the tasks' instructions; None for those of the benchmark.
        batch_size: Texts that an encoder encodes at once.
        load: Loads one side of a pair.
    """
    systems: dict[str, System] = {}
    for given in names:
        system: System
        if given in SYSTEMS:
            system = Bm25Model(given)
        else:
            pair = load_pair(given)
            name = pair.name
            if instructions and takes_instruction(pair.query):
                name += f"+{instructions.stem}"
            system = PairModel(pair, cache, batch_size=batch_size, load=load, name=name)
        name = system.name
        if not re.fullmatch(r"\w[\w.+-]*", name):
            message = (
                f"{given}: the system name '{name}' cannot be a folder name: use letters, digits, "
                "'.', '_', '+' and '-'"
            )
            raise CareError(message, code="bad_system_name", system=name)
        if name in systems:
            message = f"{given}: another system has the name '{name}' too: rename one"
            raise CareError(message, code="duplicate_system", system=name)
        systems[name] = system
    return list(systems.values())


def run_benchmark(
    systems: Sequence[System], tasks: Mapping[Task, Callable[[], TaskData]], out: Path
) -> str:
    """Scores each system on each task and returns the table of all systems in `out`.

    Writes `SYSTEM/TASK.json`, `SYSTEM/TASK.trec` and `table.md`; scores of earlier runs are kept.
    """
    for system in systems:
        for known, read in tasks.items():
            write_above(f"{system.name}: {known.column} …")
            evaluate_task(system, known, read(), out)
    table = markdown_table(read_scores(out))
    write_text(out / TABLE, table)
    return table
