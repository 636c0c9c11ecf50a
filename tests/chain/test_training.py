"""From the raw texts of the sample to exported pairs, by the commands that the documents show."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from evaluation.beir import read_documents, read_queries
from tests.chain.conftest import FOLDER, Steps
from tests.chain.starts import WIDTHS, write_document_start, write_query_start
from tests.curation.endpoints import scripted_server
from tests.curation.raw_sample import ENDPOINTS, RAW, language_model

pytestmark = pytest.mark.train

DATA, RUNS = FOLDER / "data", FOLDER / "training"
RECIPES = Path("training/recipes")
# Examples of a batch, and epochs.
SIZES = {
    "retromae": (16, 10),
    "unsupervised": (32, 20),
    "contrastive": (16, 10),
    "contrastive-large": (16, 10),
    "align": (32, 30),
    "joint": (16, 10),
}


def test_the_folder_is_empty() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)


def test_curation_writes_the_data_of_the_recipes(steps: Steps) -> None:
    raw = ["--queries", str(RAW / "queries.jsonl"), "--corpus", str(RAW / "corpus.jsonl")]
    steps.care("curate", "clean", *raw, "--output", str(DATA), "--benchmark", "70")
    rule = ["--seeds", "10", "--t", "0.93", "--n", "0"]
    for kind, name in (("queries", "queries.jsonl"), ("documents", "corpus.jsonl")):
        files = [str(DATA / "cleaned" / name), "--output", str(DATA / name)]
        steps.care("curate", "diversify", kind, *files, *rule, name=f"curate diversify {kind}")
    with scripted_server(language_model()) as url:
        for command in ("build-benchmark", "annotate", "sts", "mix"):
            config = RAW / f"{command.removeprefix('build-')}.yaml"
            changes = [f"--set={name}.base_url={url}" for name in ENDPOINTS.get(command, ())]
            steps.care("curate", command, str(config), "--data", str(DATA), *changes)
    for name in ("pairs", "queries", "corpus", "fine-tuning"):
        assert (DATA / f"{name}.jsonl").is_file()


def test_tiny_models_take_the_place_of_the_published_ones() -> None:
    texts = [document.text for document in read_documents(DATA / "cleaned" / "corpus.jsonl")]
    for name in ("queries", "benchmark"):
        texts += read_queries(DATA / "cleaned" / f"{name}.jsonl").values()
    write_query_start(FOLDER / "start" / "query", texts)
    for name, width in WIDTHS.items():
        write_document_start(FOLDER / "start" / name, texts, width)


def changes_of(name: str) -> list[str]:
    """Returns the paths, sizes and steps of a tiny run; fp16 needs a GPU."""
    width = WIDTHS[name]
    sets: dict[str, Any] = {
        "variables.data": DATA,
        "variables.query": FOLDER / "start" / "query",
        "variables.document": FOLDER / "start" / name,
        "document.dimension": 64,
        "dev.start": True,
        "stages.contrastive-large.dimensions": [16, 32, 64, width],
    }
    large = ("contrastive-large", "teacher", "joint")
    for stage in (*SIZES, "teacher"):
        if name == "care-0.3b-4b" or stage not in large:
            sets[f"stages.{stage}.precision"] = "fp32"
    for stage, (batch, epochs) in SIZES.items():
        sets |= {f"stages.{stage}.batch": batch, f"stages.{stage}.epochs": epochs}
        sets[f"stages.{stage}.log_every"] = 5
    if name == "care-0.3b-4b":
        sets["document.dtype"] = "float32"
    return [f"--set={key}={value}" for key, value in sets.items()]


@pytest.mark.parametrize(("name", "processes"), [("care-0.3b-8b", 2), ("care-0.3b-4b", 1)])
def test_the_shipped_recipe_trains_a_pair(steps: Steps, name: str, processes: int) -> None:
    words = ["train", str(RECIPES / f"{name}.yaml"), "--out", str(RUNS), *changes_of(name)]
    title = f"train {name}, {processes} processes"
    steps.care(*words, name=title, processes=processes)
    summary = json.loads((RUNS / "runs" / f"{name}-seed0" / "summary.json").read_text("utf-8"))
    measured = {}
    for stage, facts in summary["stages"].items():
        folder = RUNS / "runs" / f"{name}-seed0" / facts["folder"]
        if stage == "teacher":
            continue
        history = json.loads((folder / "metrics.json").read_text("utf-8"))
        losses = [entry["loss"] for entry in history if "loss" in entry]
        found = [entry["dev_nDCG@10"] for entry in history if "dev_nDCG@10" in entry]
        measured[stage] = found
        line = f"loss {losses[0]:.3f} to {losses[-1]:.3f}"
        if found:
            line += f", nDCG@10 {found[0]:.3f} to {found[-1]:.3f}"
        steps.add(f"  {stage}", facts["seconds"], line)
