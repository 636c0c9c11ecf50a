"""From the raw texts of the sample to exported pairs, by the commands that the documents show."""

import json
import shutil
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from evaluation.beir import read_documents, read_queries
from tests.chain.conftest import FOLDER, PAIRS, WIDTHS, Steps
from tests.chain.starts import write_document_start, write_query_start
from tests.curation.endpoints import scripted_server
from tests.curation.raw_sample import ENDPOINTS, RAW, language_model

# Of each step, on a machine that does other work too.
pytestmark = [pytest.mark.train, pytest.mark.timeout(900)]

DATA, RUNS = FOLDER / "data", FOLDER / "training"
RECIPES = Path("training/recipes")
# Examples of a batch, and epochs.
SIZES = {
    "retromae": (16, 5),
    "unsupervised": (32, 10),
    "contrastive": (16, 5),
    "contrastive-large": (16, 4),
    "align": (8, 15),
    "joint": (16, 5),
}


def test_the_folder_is_empty() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)


def test_curation_writes_the_data_of_the_recipes(steps: Steps) -> None:
    raw = ["--queries", str(RAW / "queries.jsonl"), "--corpus", str(RAW / "corpus.jsonl")]
    steps.care("curate", "clean", *raw, "--output", str(DATA), "--benchmark", "70")
    for kind, name in (("queries", "queries.jsonl"), ("documents", "corpus.jsonl")):
        files = [str(DATA / "cleaned" / name), "--output", str(DATA / name)]
        steps.care("curate", "diversify", kind, *files, name=f"curate diversify {kind}")
    with scripted_server(language_model()) as url:
        for command in ("build-benchmark", "annotate", "sts", "mix"):
            config = RAW / f"{command.removeprefix('build-')}.yaml"
            changes = [f"--set={name}.base_url={url}" for name in ENDPOINTS.get(command, ())]
            steps.care("curate", command, str(config), "--data", str(DATA), *changes)
    for name in ("pairs", "queries", "corpus", "fine-tuning"):
        assert (DATA / f"{name}.jsonl").is_file()


def test_tiny_models_take_the_place_of_the_published_ones() -> None:
    texts = [document.text for document in read_documents(DATA / "cleaned" / "corpus.jsonl")]
    texts += [document.text for document in read_documents(RAW.parent / "corpus.jsonl")]
    for name in ("queries", "benchmark"):
        texts += read_queries(DATA / "cleaned" / f"{name}.jsonl").values()
    write_query_start(FOLDER / "start" / "query", texts)
    for name, width in WIDTHS.items():
        write_document_start(FOLDER / "start" / name, texts, width)


def changes_of(name: str) -> list[str]:
    """Returns the paths, sizes and steps of a tiny run; fp16 needs a GPU.

    Weights in bfloat16 and bf16 take processors without its instructions 50 times as long: the 8B
    pair has both, but computes in bf16 in a short `joint` only, cuts its texts and trains less.
    """
    width = WIDTHS[name]
    sets: dict[str, Any] = {
        "variables.data": DATA,
        "variables.query": FOLDER / "start" / "query",
        "variables.document": FOLDER / "start" / name,
        "document.dimension": 64,
        "dev.start": True,
        "stages.contrastive-large.dimensions": [16, 32, 64, width],
    }
    for stage in (*SIZES, "teacher"):
        if name == "care-0.3b-4b" or stage != "joint":
            sets[f"stages.{stage}.precision"] = "fp32"
    for stage, (batch, epochs) in SIZES.items():
        sets |= {f"stages.{stage}.batch": batch, f"stages.{stage}.epochs": epochs}
        sets[f"stages.{stage}.log_every"] = 1
    if name == "care-0.3b-4b":
        sets["document.dtype"] = "float32"
    else:
        sets["document.max_length"] = 64
        for stage, epochs in {"contrastive-large": 2, "align": 8, "joint": 1}.items():
            sets[f"stages.{stage}.epochs"] = epochs
    return [f"--set={key}={value}" for key, value in sets.items()]


@pytest.mark.parametrize(("name", "processes"), [("care-0.3b-8b", 2), ("care-0.3b-4b", 1)])
def test_the_shipped_recipe_trains_a_pair(steps: Steps, name: str, processes: int) -> None:
    words = ["train", str(RECIPES / f"{name}.yaml"), "--out", str(RUNS), *changes_of(name)]
    title = f"train {name}, {processes} processes"
    steps.care(*words, name=title, processes=processes)
    for stage, history in histories(name).items():
        losses = [entry["loss"] for entry in history["metrics"] if "loss" in entry]
        third = len(losses) // 3
        first, last = fmean(losses[:third]), fmean(losses[-third:])
        line = f"loss {first:.3f} to {last:.3f}"
        if scores := history["scores"]:
            line += f", nDCG@10 {scores[0]:.3f} to {scores[-1]:.3f}"
        steps.add(f"  {stage}", history["seconds"], line)
        assert last < first, stage


@pytest.mark.parametrize("name", PAIRS)
def test_the_trained_pair_exceeds_that_before_training(name: str) -> None:
    """The score before alignment is that of encoders that were trained apart."""
    found = histories(name)
    assert found["joint"]["scores"][-1] > found["align"]["scores"][0]


@pytest.mark.parametrize("name", PAIRS)
def test_the_trained_pair_is_exported_under_its_name(steps: Steps, name: str) -> None:
    run = RUNS / "runs" / f"{name}-seed0" / "pair.toml"
    out = FOLDER / "pairs" / name
    words = ["export", "--pair", str(run), "--out", str(out), "--document", "merged"]
    # Measurements of other precisions say nothing about tiny models, and take a minute.
    steps.care(*words, "--precision", "fp32", "--corpus", "none", name=f"export {name}")
    assert (out / "pair.toml").is_file() and (out / "document" / "config.json").is_file()


def histories(name: str) -> dict[str, Any]:
    """Returns metrics, seconds and scores on the development set of each stage that trains."""
    run = RUNS / "runs" / f"{name}-seed0"
    stages = json.loads((run / "summary.json").read_text("utf-8"))["stages"]
    found = {}
    for stage, facts in stages.items():
        path = run / facts["folder"] / "metrics.json"
        if path.is_file():
            metrics = json.loads(path.read_text("utf-8"))
            scores = [entry["dev_nDCG@10"] for entry in metrics if "dev_nDCG@10" in entry]
            found[stage] = {"metrics": metrics, "seconds": facts["seconds"], "scores": scores}
    return found
