"""Runs the ablations and baselines of CARE with several seeds, and scores what comes out.

OUT/stages, runs, …          as `models.training.run` describes; recipes that begin alike share
OUT/scores/<key>/<name>-seed<n>.json   scores of each question; the key is a checksum of the data
OUT/table.md, scores.json, scores.png   what `models.training.ablation_report` makes of them
"""

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from core.errors import TrainingError
from core.files import sha256_file, write_text
from core.types import Document, FloatArray, Role
from models.encoders.checkpoints import checkpoint_folder
from models.evaluation.bm25 import Bm25Index
from models.evaluation.scores import MAP_10, NDCG_10, score_queries
from models.pairs import load_pair
from models.training.ablation_report import MAP, NDCG, ORDER, Scores, write_report
from models.training.data import DevSet, read_dev
from models.training.dev import search
from models.training.folders import writing
from models.training.recipe import Dev, EncoderStart, Prompts, Recipe, load_recipe
from models.training.run import RESULT, Report, run
from models.training.starts import prepare
from models.training.vectors import stored

RECIPES = Path(__file__).parent / "recipes" / "ablations"
# Documents that are searched beside the judged ones: every trained document encoder encodes all.
_OTHERS = 300
# Of each question, to be reranked: positives, and others drawn from the first that BM25 finds.
_CANDIDATES = 20
_DEPTH = 50
_SEED = 20260413
_BATCH = 64
_LIBRARIES = ("torch", "transformers", "sentence-transformers", "accelerate")


@dataclass(frozen=True, slots=True)
class TestSet:
    """What all pairs are scored on.

    Attributes:
        dev: Questions, the documents that are searched, judgements.
        candidates: Ids of the documents that are reranked, by question.
    """

    dev: DevSet
    candidates: dict[str, list[str]]


def run_ablations(
    data: Path,
    out: Path,
    seeds: int,
    only: Sequence[str],
    report: Report,
    recipes: Path = RECIPES,
) -> Path:
    """Runs recipes with each seed, scores them and writes a table of all scores in `out`.

    Args:
        data: A BEIR folder with `train.paraphrases.jsonl`; its split `dev` is scored once, at
            the end: nothing is chosen by it.
        out: Where everything is written; finished stages there are reused.
        seeds: How many seeds, from 0.
        only: Names of recipes; none for all.
        report: Called with each line of progress.
        recipes: The folder of recipes.

    Returns:
        The table.

    Raises:
        CareError: If a name is unknown, or as `models.training.run.run`.
    """
    if seeds < 1:
        raise TrainingError(f"--seeds: {seeds} is less than 1")
    chosen = _load(recipes, data, only)
    test = read_test(data)
    scores = out / "scores" / _checksum(data)
    with writing(out):
        for seed in range(seeds):
            for recipe in chosen:
                report(f"{recipe.name}, seed {seed}")
                folder = run(recipe, out, seed, report)
                values = score_pair(folder / "pair.toml", test, out)
                path = scores / f"{recipe.name}-seed{seed}.json"
                path.parent.mkdir(parents=True, exist_ok=True)
                write_text(path, json.dumps(values) + "\n")
                means = {name: round(float(np.mean(found)), 4) for name, found in values.items()}
                report(f"{recipe.name}, seed {seed}: {means}")
            titles = {recipe.name: recipe.description for recipe in _load(recipes, data, ())}
            write_report(out, titles, read_scores(scores), _facts(test, out))
    return out / "table.md"


def read_test(data: Path, others: int = _OTHERS) -> TestSet:
    """Reads the questions of the split `dev`, with documents to search and to rerank.

    Args:
        data: A BEIR folder.
        others: How many documents are searched beside the judged ones, drawn by checksums.
    """
    dev = read_dev(Dev(beir=str(data), documents=others))
    index = Bm25Index(Document(id=id_, text=text) for id_, text in dev.documents.items())
    found = index.search(list(dev.queries.values()), _DEPTH)
    random = np.random.default_rng(_SEED)
    candidates = {}
    for query, hits in zip(dev.queries, found, strict=True):
        judged = dev.qrels[query]
        negatives = [id_ for id_ in hits if id_ not in judged]
        count = min(len(negatives), max(0, _CANDIDATES - len(judged)))
        drawn = random.choice(negatives, count, replace=False).tolist() if count else []
        candidates[query] = [*judged, *drawn]
    return TestSet(dev, candidates)


def score_pair(path: Path, test: TestSet, out: Path) -> dict[str, list[float]]:
    """Scores a pair by exact search and by reranking with its cosines.

    Args:
        path: The pair's TOML file.
        test: What it is scored on.
        out: Where vectors are kept: pairs that share an encoder share its vectors.

    Returns:
        nDCG@10 and MAP@10 of each question, in the order of the judgements.
    """
    dev = test.dev
    queries = _vectors(path, "query", list(dev.queries.values()), out)
    documents = _vectors(path, "document", list(dev.documents.values()), out)
    row_of = {id_: row for row, id_ in enumerate(dev.documents)}
    reranked = {}
    for query, vector in zip(dev.queries, queries, strict=True):
        ids = test.candidates[query]
        cosines = documents[[row_of[id_] for id_ in ids]] @ vector
        reranked[query] = dict(zip(ids, cosines.tolist(), strict=True))
    ranked = search(dev, queries, documents)
    return {
        NDCG: list(score_queries(NDCG_10, dev.qrels, ranked).values()),
        MAP: list(score_queries(MAP_10, dev.qrels, reranked).values()),
    }


def read_scores(folder: Path) -> Scores:
    """Returns measures of each question, by recipe, seed and measure, as far as they are there."""
    scores: dict[str, dict[int, dict[str, list[float]]]] = {}
    for path in sorted(folder.glob("*-seed*.json")):
        name, _, seed = path.stem.rpartition("-seed")
        scores.setdefault(name, {})[int(seed)] = json.loads(path.read_text(encoding="utf-8"))
    return scores


def _checksum(data: Path) -> str:
    files = [path for path in sorted(data.iterdir()) if path.is_file()]
    facts = "".join(f"{path.name} {sha256_file(path)}\n" for path in files)
    return hashlib.sha256(facts.encode()).hexdigest()[:12]


def _load(recipes: Path, data: Path, only: Sequence[str]) -> list[Recipe]:
    found = {}
    for path in sorted(recipes.glob("*.yaml")):
        recipe = load_recipe(path, [f"variables.data={json.dumps(str(data))}"])
        found[recipe.name] = recipe
    if unknown := [name for name in only if name not in found]:
        raise TrainingError(f"--only: there is no '{unknown[0]}': {', '.join(sorted(found))}")
    names = sorted(found, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))
    return [found[name] for name in names if not only or name in only]


def _vectors(path: Path, role: Role, texts: Sequence[str], out: Path) -> FloatArray:
    pair = load_pair(str(path))
    spec = getattr(pair, role)
    start = EncoderStart(
        start=str(checkpoint_folder(spec, pair.folder).resolve()),
        pooling=spec.pooling,
        prompts=Prompts(query=spec.prompt, document=spec.prompt),
        max_length=spec.max_length,
        dimension=spec.dimension,
    )
    side = prepare(start, role, out / "starts")
    return stored(out / "vectors", side, role, texts, batch=_BATCH, precision="bf16")


def _facts(test: TestSet, out: Path) -> Mapping[str, Any]:
    """What the scores were measured on and with."""
    results = (out / "stages").glob(f"*/{RESULT}")
    seconds = [json.loads(path.read_text(encoding="utf-8"))["seconds"] for path in results]
    return {
        "questions": len(test.dev.queries),
        "documents": len(test.dev.documents),
        "candidates": _CANDIDATES,
        "stages": len(seconds),
        "stage_minutes": round(sum(seconds) / 60, 1),
        "processor": _processor(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "libraries": {name: version(name) for name in _LIBRARIES},
    }


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
