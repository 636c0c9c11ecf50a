import json
from pathlib import Path
from typing import Any

import pytest

from core.encoders import Pooling
from core.errors import PairError
from models.encoders.modules import read_modules, write_modules
from tests.errors import raises


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"hidden_size": 64}')
    return tmp_path


def write_rows(folder: Path, *kinds: str) -> None:
    rows = [{"path": kind, "type": f"sentence_transformers.models.{kind}"} for kind in kinds]
    (folder / "modules.json").write_text(json.dumps(rows))


def test_a_checkpoint_without_modules_is_only_a_transformer(checkpoint: Path) -> None:
    assert read_modules(checkpoint, "cls") == (checkpoint, [])


@pytest.mark.parametrize("pooling", ["cls", "mean", "last_token"])
def test_written_modules_are_read(checkpoint: Path, pooling: Pooling) -> None:
    (checkpoint / "2_Dense").mkdir()
    prompts = {"query": "问："}
    write_modules(checkpoint, pooling, max_length=48, prompts=prompts, dense=["2_Dense"])
    kinds = [row["type"] for row in json.loads((checkpoint / "modules.json").read_text("utf-8"))]
    names = ["Transformer", "Pooling", "Dense", "Normalize"]
    assert kinds == [f"sentence_transformers.models.{name}" for name in names]
    assert read_modules(checkpoint, pooling) == (checkpoint, [checkpoint / "2_Dense"])
    config = json.loads((checkpoint / "1_Pooling" / "config.json").read_text("utf-8"))
    assert config["word_embedding_dimension"] == 64


@pytest.mark.parametrize("path", ["../other", "/etc", "2_Dense/../../other", ".."])
def test_a_module_outside_of_the_checkpoint_is_an_error(checkpoint: Path, path: str) -> None:
    rows = [{"path": path, "type": "sentence_transformers.models.Dense"}]
    (checkpoint / "modules.json").write_text(json.dumps(rows))
    with raises(PairError, "bad_module", path=checkpoint / "modules.json", folder=path):
        read_modules(checkpoint, "cls")


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode": "lasttoken"}, "last_token"),
        ({"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens"),
    ],
)
def test_another_pooling_than_that_of_the_checkpoint_is_an_error(
    checkpoint: Path, config: dict[str, Any], found: str
) -> None:
    write_modules(checkpoint, "mean", max_length=48, prompts={})
    path = checkpoint / "1_Pooling" / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    with raises(PairError, "other_pooling", path=path, found=found, expected="mean"):
        read_modules(checkpoint, "mean")
    path.write_text(json.dumps({"pooling_mode": "mean"}), encoding="utf-8")
    read_modules(checkpoint, "mean")


@pytest.mark.parametrize(
    ("kinds", "module"),
    [(("Transformer", "CNN"), "CNN"), (("Pooling",), "Transformer")],
)
def test_other_modules_are_an_error(checkpoint: Path, kinds: tuple[str, ...], module: str) -> None:
    write_rows(checkpoint, *kinds)
    path = checkpoint / "modules.json"
    with raises(PairError, "unsupported_module", path=path, module=module):
        read_modules(checkpoint, "mean")
