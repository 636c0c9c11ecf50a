"""The commands `care train`, `phrases`, `splits`, `convert`, and those that a run prints."""

import json
import shlex
from pathlib import Path

import pytest
import yaml

from care.cli.main import main
from core.versions import IndexFolder
from evaluation.beir import write_split
from models.pairs import load_pair
from tests.conftest import write_jsonl
from tests.errors import error_code

pytestmark = pytest.mark.train


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe that trains a tiny encoder for a few steps."""
    from tests.checkpoints import MAX_LENGTH, TEXTS, write_bert, write_qwen3

    folder = tmp_path_factory.mktemp("recipe")
    records = [{"query": text, "positives": [text]} for text in TEXTS]
    triples = write_jsonl(folder / "triples.jsonl", records)
    common = {"max_length": MAX_LENGTH}
    query = {"start": str(write_bert(folder / "bert")), "pooling": "cls"}
    document = {
        "start": str(write_qwen3(folder / "qwen3", ends_texts=False)),
        "pooling": "last_token",
        "prompts": {"query": "", "document": ""},
    }
    facts = {
        "name": "tiny",
        "query": query | common,
        "document": document | common,
        "stages": [
            {"kind": "teacher", "data": [{"triples": str(triples)}]},
            # So many epochs that most texts find their own vectors: an index demands it.
            {
                "kind": "align",
                "batch": 6,
                "epochs": 60,
                "learning_rate": 3e-3,
                "dropout": 0.0,
            },
        ],
    }
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(facts), encoding="utf-8")
    return path


def test_the_commands_that_a_run_prints_make_an_index_of_the_trained_pair(
    recipe: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", str(recipe)]) == 0
    export, index = (shlex.split(line) for line in capsys.readouterr().out.splitlines()[-2:])
    assert (export[0], index[0]) == ("next:", "then:")
    assert main(export[export.index("export") :]) == 0
    from tests.checkpoints import TEXTS

    records = [{"_id": f"d{i}", "text": text} for i, text in enumerate(TEXTS)]
    corpus = write_jsonl(tmp_path / "corpus.jsonl", records)
    words = index[index.index("index") :]
    assert words[:4] == ["index", "CORPUS", "--index", "NAME"]
    assert main(["index", str(corpus), "--index", "tiny", *words[4:]]) == 0
    assert IndexFolder(tmp_path / "indexes", "tiny").active()


def test_the_result_of_a_run_is_json(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = ["--set", "stages.align.epochs=1", "--set", "seeds=[0, 1]"]
    assert main(["train", str(recipe), "--out", str(tmp_path / "out"), *short, "--json"]) == 0
    shown = capsys.readouterr()
    runs = json.loads(shown.out)["runs"]
    assert [Path(run["folder"]).name for run in runs] == ["tiny-seed0", "tiny-seed1"]
    assert all(load_pair(run["pair"]).name == "tiny" for run in runs)
    assert "align" in shown.err


def test_a_wrong_recipe_is_an_error(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(recipe), "--set", "stages.align.lambda=1"]) == 1
    errors = capsys.readouterr().err
    assert error_code(errors) == "unknown_key" and str(recipe) in errors
    out = tmp_path / "phrases.jsonl"
    assert main(["phrases", str(recipe), "--out", str(out), "--lengths", "9", "3"]) == 1
    assert error_code(capsys.readouterr().err) == "invalid_lengths"
    assert not out.exists()


def test_texts_for_alignment_are_written(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "phrases.jsonl"
    options = ["--count", "20", "--lengths", "5", "40"]
    assert main(["phrases", str(recipe), "--out", str(out), *options]) == 0
    texts = [json.loads(line)["text"] for line in out.read_text("utf-8").splitlines()]
    assert len(texts) == 20
    assert all(5 <= len(text) <= 40 for text in texts)


def test_splits_are_written_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, out = tmp_path / "data", tmp_path / "out"
    data.mkdir()
    texts = {f"q{i}": f"第{i}个高血压病人怎么治疗？" for i in range(1100)}
    write_jsonl(
        data / "corpus.jsonl",
        [{"_id": "d", "text": "少吃盐。", "metadata": {"source": "patient-qa"}}],
    )
    write_split(data, "train", texts, {id_: {"d": 1} for id_ in texts})
    words = ["splits", "--data", str(data), "--out", str(out), "--json"]
    assert main(words) == 0
    sizes = json.loads(capsys.readouterr().out)["splits"]
    assert sizes["held-out-patients"] == 1000 and sizes["tune"] == 100
    assert sizes["held-out-reworded"] >= 1000
    # The questions that were rewritten by hand are not in this folder.
    assert "held-out-spoken" not in sizes
    assert len((out / "unseen.queries.jsonl").read_text("utf-8").splitlines()) == sizes["unseen"]
    assert main(words) == 1
    assert error_code(capsys.readouterr().err) == "folder_exists"
