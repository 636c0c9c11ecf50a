"""Runs the ablations and baselines of CARE with several seeds, and scores the trained pairs.

OUT/stages, runs, …          see `training.run`; recipes share stages with equal inputs
OUT/scores/<key>/<name>-seed<n>.json    scores of each question; the key is a checksum of the data
OUT/table.md, scores.json, scores.png   the report of `training.experiments.ablation_report`
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch

from core.encoders import Role
from core.files import write_text
from core.provenance import environment, processor
from core.types import Document, FloatArray
from evaluation.bm25 import bm25_run
from evaluation.metrics import MAP_10, NDCG_10, score_queries
from models.encoders.checkpoints import checkpoint_folder
from models.pairs import load_pair
from training.data import DevSet, read_dev
from training.errors import TrainingError
from training.experiments.ablation_report import MAP, NDCG, ORDER, Scores, write_report
from training.files import PAIR, RESULT, checksum, read_json, writing
from training.init import prepare
from training.recipe import Recipe, load_recipe
from training.run import Report, run
from training.schema import Dev, EncoderInit, Prompts
from training.stages.base import checksums
from training.vectors import frozen_vectors

RECIPES = Path(__file__).parents[1] / "recipes" / "ablations"
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


def run_ablations(
    data: Path, out: Path, seeds: int, only: Sequence[str], report: Report, recipes: Path = RECIPES
) -> Path:
    """Runs recipes, scores the trained pairs, and writes a table of all scores.

    Args:
        data: A BEIR folder with `train.paraphrases.jsonl`. Its split `dev` is the test set; it
            is not used to select anything.
        out: Folder of stages, scores and the report.
        seeds: Number of seeds, counted from 0.
        only: Names of the recipes to run; empty for all.
        report: Called with each line of progress.
        recipes: Folder of the recipes.

    Returns:
        The path of the table in `out`.

    Raises:
        TrainingError: If a recipe is unknown or invalid.
    """
    known = _load(recipes, data)
    if unknown := [name for name in only if name not in known]:
        reason = f"unknown recipe '{unknown[0]}': choose from {', '.join(sorted(known))}"
        raise TrainingError.at("--only", reason, "unknown_recipe", name=unknown[0])
    test = read_test(data)
    files = sorted(path for path in data.iterdir() if path.is_file())
    key = checksum([[path.name for path in files], checksums(files)])
    scores = out / "scores" / key[:12]
    with writing(out):
        scores.mkdir(parents=True, exist_ok=True)
        for seed in range(seeds):
            for name in (name for name in known if not only or name in only):
                report(f"{name}, seed {seed}")
                folder = run(known[name], out, seed, report)
                values = score_pair(folder / PAIR, test, out)
                write_text(scores / f"{name}-seed{seed}.json", json.dumps(values) + "\n")
                means = {measure: round(fmean(found), 4) for measure, found in values.items()}
                report(f"{name}, seed {seed}: {means}")
            titles = {name: recipe.description for name, recipe in known.items()}
            write_report(out, titles, read_scores(scores), _conditions(test, out))
    return out / "table.md"


def read_test(data: Path) -> TestSet:
    """Reads the questions of the split `dev` with the documents to search and to rerank."""
    dev = read_dev(Dev(beir=str(data), documents=_DISTRACTORS))
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


def score_pair(path: Path, test: TestSet, out: Path) -> dict[str, list[float]]:
    """Returns nDCG@10 and MAP@10 of each question, in the order of the judgements.

    nDCG@10 is measured with exact search, MAP@10 by reranking the candidates by cosine. Vectors
    are cached in `out`, so that pairs with the same encoder share them.
    """
    dev = test.dev
    queries = _vectors(path, "query", dev.texts("query"), out)
    documents = _vectors(path, "document", dev.texts("document"), out)
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


def read_scores(folder: Path) -> Scores:
    """Reads the scores of all finished runs in a folder."""
    scores: dict[str, dict[int, dict[str, list[float]]]] = {}
    for path in sorted(folder.glob("*-seed*.json")):
        name, _, seed = path.stem.rpartition("-seed")
        scores.setdefault(name, {})[int(seed)] = read_json(path)
    return scores


def _load(recipes: Path, data: Path) -> dict[str, Recipe]:
    """Returns all recipes by name, in the order of the table."""
    change = f"variables.data={json.dumps(str(data))}"
    found = [load_recipe(path, [change]) for path in sorted(recipes.glob("*.yaml"))]
    found.sort(key=lambda recipe: (*ORDER, recipe.name).index(recipe.name))
    return {recipe.name: recipe for recipe in found}


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
    return frozen_vectors(cache, checkpoint, role, texts, batch=_BATCH, precision="bf16")


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
