"""The commands `care late-interaction export` and `evaluate`."""

import json
from pathlib import Path

import numpy as np
import pytest

from care.cli.main import main
from tests.conftest import write_jsonl
from tests.errors import error_code

pytestmark = pytest.mark.train

DOCUMENTS = {
    "d1": "高血压患者应当少盐饮食，按时服药。",
    "d2": "骨折以后先固定，再送医院。",
    "d3": "孩子发烧，先物理降温。",
}
QUERIES = {"q1": "高血压吃什么", "q2": "骨折怎么办", "q3": "小孩发烧了"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from safetensors.numpy import save_file

    folder = tmp_path_factory.mktemp("tokens")
    matrix = np.random.default_rng(0).standard_normal((384, 8)).astype(np.float32)
    save_file({"query": matrix, "document": matrix.copy()}, folder / "tokens.safetensors")
    command = ["late-interaction", "export", "--projections", str(folder / "tokens.safetensors")]
    assert main([*command, "--out", str(folder / "pair")]) == 0
    return folder / "pair" / "pair.toml"


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """The evaluation of two queries, with weights chosen on the third."""
    texts = {"corpus": DOCUMENTS, "queries": QUERIES}
    command = ["late-interaction", "evaluate", "--poolings", "2"]
    for name, found in texts.items():
        records = [{"_id": id_, "text": text} for id_, text in found.items()]
        command += [f"--{name}", str(write_jsonl(tmp_path / f"{name}.jsonl", records))]
    for name, numbers in {"qrels": "12", "tuning-qrels": "3"}.items():
        path = tmp_path / f"{name}.tsv"
        path.write_text("".join(f"q{n}\td{n}\t1\n" for n in numbers), encoding="utf-8")
        command += [f"--{name}", str(path)]
    return command


def test_the_table_is_printed_and_written(
    pair: Path, command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "table.json"
    assert main([*command, "--pair", str(pair), "--json", "--output", str(output)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result == json.loads(output.read_text(encoding="utf-8"))
    assert (result["dimension"], result["queries"]) == (8, 2)
    rows = result["rows"]
    assert [row["codec"] for row in rows[2::2]] == ["fp16", "int8", "2bit", "1bit"]
    size = rows[2]["bytes_per_passage"]
    assert [row["bytes_per_passage"] for row in rows[2::2]] == [size, size / 2, size / 8, size / 16]
    assert main([*command, "--pair", str(pair)]) == 0
    assert capsys.readouterr().out.count("\n| dense") == len(rows)


def test_a_pair_without_token_vectors_is_an_error(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--pair", "care-mini"]) == 1
    assert error_code(capsys.readouterr().err) == "no_token_output"


def test_poolings_are_numbers(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--pair", "care-mini", "--poolings", "1,x"]) == 2
    assert "--poolings" in capsys.readouterr().err
