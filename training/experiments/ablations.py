"""Runs the ablations and baselines of CARE with several seeds, and scores the trained pairs.

OUT/stages, runs, …          see `training.run`; recipes share stages with equal inputs
OUT/scores/<key>/<name>-seed<n>.json    scores of each question; the key is a checksum of the data
OUT/scores.json, table.md    the report: scores, decided differences, and tables
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch

from core.encoders import Role
from core.files import write_text
from core.provenance import environment, processor
from core.types import Document, FloatArray
from core.vectors import truncate_normalize
from evaluation.bm25 import bm25_run
from evaluation.metrics import MAP_10, NDCG_10, score_queries
from evaluation.statistics import decide, paired_difference
from models.encoders.checkpoints import checkpoint_folder
from models.pairs import load_pair
from training.data import DevSet, read_dev
from training.errors import TrainingError
from training.experiments.tables import MARGIN, Tables, read_tables, render
from training.files import PAIR, RESULT, checksum, read_json, writing
from training.init import prepare
from training.recipe import Recipe, load_recipe
from training.run import Report, run
from training.schema import Dev, EncoderInit, Part, Prompts
from training.stages.base import checksums
from training.vectors import frozen_shards

MEASURES = NDCG, MAP = "nDCG@10", "MAP@10"
SCORES, TABLE = "scores.json", "table.md"
# Scores of each question, by recipe, seed and measure.
Scores = Mapping[str, Mapping[int, Mapping[str, Sequence[float]]]]
RECIPES = Path(__file__).parents[1] / "recipes" / "ablations"
# Questions of the split `train` that are tested, as those of `dev`: no recipe trains on them.
HELD_OUT = Part(folds=8, only=7)
# Unjudged documents to search. Few, because each document encoder encodes all of them.
_DISTRACTORS = 300
# Documents per question to rerank: the positives, and others sampled from BM25's first hits.
_CANDIDATES = 20
_BM25_DEPTH = 50
_SEED = 20260413
_BATCH = 64


class TestSet(NamedTuple):
    """Test data of all pairs; `candidates` are the ids of the documents to rerank, by question."""

    dev: DevSet
    candidates: dict[str, list[str]]


class Ablation(NamedTuple):
    """A recipe, and the checksum of its settings by which its scores are found again."""

    recipe: Recipe
    key: str


def run_ablations(
    data: Path,
    out: Path,
    only: Sequence[str],
    report: Report,
    *,
    recipes: Path = RECIPES,
    seeds: int | None = None,
    train: bool = True,
    diversify: Callable[[Path, Path], None] | None = None,
) -> Path:
    """Runs recipes, scores the trained pairs, and returns the path of the tables of all scores.

    An interrupted call resumes: finished stages and scores are reused.

    Args:
        data: A BEIR folder with `train.paraphrases.jsonl`. Its split `dev` and the part `HELD_OUT`
            of its split `train` are the test set; they are not used to select anything.
        only: Names of the recipes to run; empty for all.
        recipes: Folder of the recipes and of `tables.toml`.
        seeds: Number of the seeds of each recipe to run; None for all.
        train: False to write the report of finished runs only.
        diversify: Writes the folder that recipes name as `${diversified}`, from `data`; called
            before the first run of such a recipe.
    """
    tables = read_tables(recipes)
    diversified = out / "diversified"
    known = _load(recipes, {"data": data, "diversified": diversified}, tables)
    if unknown := [name for name in only if name not in known]:
        reason = f"unknown recipe '{unknown[0]}': choose from {', '.join(sorted(known))}"
        raise TrainingError.at("--only", reason, "unknown_recipe", name=unknown[0])
    chosen = {name: found for name, found in known.items() if not only or name in only}
    test = read_test(data)
    files = sorted(path for path in data.rglob("*") if path.is_file())
    names = [path.relative_to(data).as_posix() for path in files]
    key = checksum([names, checksums(files), HELD_OUT.model_dump()])
    scores = out / "scores" / key[:12]
    with writing(out):
        scores.mkdir(parents=True, exist_ok=True)
        for seed, name in _order(chosen, seeds) if train else ():
            report(f"{name}, seed {seed}")
            if diversify and _reads(chosen[name].recipe, diversified):
                diversify(data, diversified)
            folder = run(chosen[name].recipe, out, seed, report)
            for dimension in (None, *_dimensions(tables, name)):
                values = score_pair(folder / PAIR, test, out, dimension)
                row = f"{name}@{dimension}" if dimension else name
                record = {"recipe": chosen[name].key, "scores": values}
                write_text(scores / f"{row}-seed{seed}.json", json.dumps(record) + "\n")
                means = {measure: round(fmean(found), 4) for measure, found in values.items()}
                report(f"{row}, seed {seed}: {means}")
        write_report(out, tables, read_scores(scores, known), _conditions(test, out))
    return out / TABLE


def read_test(data: Path) -> TestSet:
    dev = read_dev(Dev(beir=str(data), documents=_DISTRACTORS))
    more = read_dev(Dev(beir=str(data), split="train", part=HELD_OUT, documents=0))
    dev = DevSet(
        dev.queries | more.queries, dev.documents | more.documents, {**dev.qrels, **more.qrels}
    )
    documents = (Document(id=id_, text=text) for id_, text in dev.documents.items())
    random = np.random.default_rng(_SEED)
    candidates = {}
    for query, hits in bm25_run(documents, dev.queries, _BM25_DEPTH).items():
        judged = dev.qrels[query]
        negatives = [id_ for id_ in hits if id_ not in judged]
        count = min(len(negatives), max(0, _CANDIDATES - len(judged)))
        sampled = random.choice(negatives, count, replace=False).tolist() if count else []
        candidates[query] = [*judged, *sampled]
    return TestSet(dev, candidates)


def score_pair(
    path: Path, test: TestSet, out: Path, dimension: int | None = None
) -> dict[str, list[float]]:
    """Returns nDCG@10 and MAP@10 of each question, in the order of the judgements.

    nDCG@10 is measured with exact search, MAP@10 by reranking the candidates by cosine, of vectors
    that are cut to `dimension`. Pairs with the same encoder share its vectors in `out`.
    """
    dev = test.dev
    roles: tuple[Role, ...] = ("query", "document")
    whole = (_vectors(path, role, dev.texts(role), out) for role in roles)
    queries, documents = (truncate_normalize(v, dimension or v.shape[1]) for v in whole)
    row_of = {id_: row for row, id_ in enumerate(dev.documents)}
    reranked = {}
    for query, vector in zip(dev.queries, queries, strict=True):
        ids = test.candidates[query]
        cosines = documents[[row_of[id_] for id_ in ids]] @ vector
        reranked[query] = dict(zip(ids, cosines.tolist(), strict=True))
    ranked = dev.search(queries, documents)
    return {
        NDCG: list(score_queries(NDCG_10, dev.qrels, ranked).values()),
        MAP: list(score_queries(MAP_10, dev.qrels, reranked).values()),
    }


def read_scores(folder: Path, known: Mapping[str, Ablation]) -> Scores:
    """Reads the scores of finished runs whose recipes have not changed since."""
    scores: dict[str, dict[int, dict[str, list[float]]]] = {}
    for path in sorted(folder.glob("*-seed*.json")):
        row, _, seed = path.stem.rpartition("-seed")
        record = read_json(path)
        found = known.get(row.partition("@")[0])
        if found and found.key == record["recipe"]:
            scores.setdefault(row, {})[int(seed)] = record["scores"]
    return scores


def write_report(out: Path, tables: Tables, scores: Scores, facts: Mapping[str, Any]) -> None:
    """Writes `scores.json` and `table.md` to `out`; `facts` are data, hardware and libraries."""
    rows = [name for name in tables.recipes if name in scores]
    rows += [name for name in scores if name not in rows]
    summary = {
        "facts": dict(facts),
        "scores": {
            name: {
                measure: {str(s): round(fmean(v[measure]), 5) for s, v in scores[name].items()}
                for measure in MEASURES
            }
            for name in rows
        },
        "differences": compare(tables.pairs, scores, facts["questions"]),
    }
    write_text(out / SCORES, json.dumps(summary, indent=1, ensure_ascii=False) + "\n")
    write_text(out / TABLE, render(tables, summary))


def compare(
    pairs: Sequence[tuple[str, str]], scores: Scores, questions: int
) -> list[dict[str, Any]]:
    """Returns first minus second with interval and decision, per pair and measure.

    The value of a question is its mean over the seeds that both recipes have; confidence
    intervals are bootstrapped over questions.
    """
    compared = []
    for pair in pairs:
        first, second = (scores.get(name, {}) for name in pair)
        seeds = sorted(first.keys() & second.keys())
        for measure in MEASURES if seeds else ():
            means = (
                np.mean([found[seed][measure] for seed in seeds], axis=0).tolist()
                for found in (first, second)
            )
            difference = paired_difference(*means)
            decision = decide(difference, questions, MARGIN)
            bounds = {
                name: round(getattr(difference, name), 6) for name in ("value", "low", "high")
            }
            compared.append(
                {"first": pair[0], "second": pair[1], "measure": measure, "seeds": len(seeds)}
                | bounds
                | {"verdict": decision.verdict, "needed": decision.needed}
            )
    return compared


def _load(recipes: Path, places: Mapping[str, Path], tables: Tables) -> dict[str, Ablation]:
    """Returns all recipes by name, in the order of the tables; `places` are their variables."""
    changes = [f"variables.{name}={json.dumps(str(path))}" for name, path in places.items()]
    found = {}
    for path in sorted(recipes.glob("*.yaml")):
        # The key leaves out where the data are, and what changes no score.
        key = checksum(load_recipe(path).model_dump(mode="json", exclude={"description", "seeds"}))
        recipe = load_recipe(path, changes)
        found[recipe.name] = Ablation(recipe, key)
    order = (*tables.recipes, *found)
    return dict(sorted(found.items(), key=lambda item: order.index(item[0])))


def _reads(recipe: Recipe, folder: Path) -> bool:
    entries = (entry for stage in recipe.stages for entry in stage.data)
    return any(e.triples and Path(e.triples).is_relative_to(folder) for e in entries)


def _order(chosen: Mapping[str, Ablation], seeds: int | None) -> Iterable[tuple[int, str]]:
    """Returns (seed, name) of all runs: all recipes with one seed before the next seed."""
    runs = [(seed, name) for name in chosen for seed in chosen[name].recipe.seeds[:seeds]]
    return sorted(runs, key=lambda item: item[0])


def _dimensions(tables: Tables, name: str) -> list[int]:
    """Returns the dimensions to which the tables cut the vectors of a recipe."""
    rows = (row.partition("@") for row in tables.recipes)
    return [int(dimension) for recipe, _, dimension in rows if recipe == name and dimension]


def _vectors(path: Path, role: Role, texts: Sequence[str], out: Path) -> FloatArray:
    pair = load_pair(str(path))
    spec = pair.query if role == "query" else pair.document
    init = EncoderInit(
        start=str(checkpoint_folder(spec, pair.folder).resolve()),
        pooling=spec.pooling,
        prompts=Prompts(query=spec.prompt, document=spec.prompt),
        max_length=spec.max_length,
        dimension=spec.dimension,
    )
    checkpoint = prepare(init, role, out / "init")
    cache = out / "vectors"
    found = frozen_shards(cache, checkpoint, role, texts, batch=_BATCH, precision="bf16")
    return found.take(np.arange(len(texts)))


def _conditions(test: TestSet, out: Path) -> Mapping[str, Any]:
    """Returns the conditions of the scores: data, stages, hardware and libraries."""
    seconds = [read_json(path)["seconds"] for path in (out / "stages").glob(f"*/{RESULT}")]
    return {
        "questions": len(test.dev.queries),
        "documents": len(test.dev.documents),
        "candidates": _CANDIDATES,
        "stages": len(seconds),
        "stage_minutes": round(sum(seconds) / 60, 1),
        "processor": processor(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        "threads": torch.get_num_threads(),
        **environment(),
    }
