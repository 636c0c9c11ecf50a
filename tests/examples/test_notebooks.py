"""The notebooks that need torch, on a part of the sample; tests/engines/clients runs the other."""

import ast
from pathlib import Path

import nbclient
import nbformat
import pytest

from tests.docs.sessions import ROOT, make_checkout

pytestmark = [pytest.mark.train, pytest.mark.e2e]


def values(name: str, folder: Path) -> list[str]:
    """Runs a notebook in a folder and returns the values of its cells."""
    notebook = nbformat.read(ROOT / "examples" / f"{name}.ipynb", as_version=4)
    resources = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(notebook, timeout=600, resources=resources).execute()
    return [
        output["data"]["text/plain"]
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if output["output_type"] == "execute_result"
    ]


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that looks like a checkout, in which the kernel starts."""
    make_checkout(tmp_path / "checkout")
    (tmp_path / "checkout" / "examples").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return tmp_path / "checkout" / "examples"


@pytest.mark.timeout(900)
def test_a_pair_is_trained_exported_and_scored(checkout: Path) -> None:
    seconds, hits, scores = map(ast.literal_eval, values("train-a-pair", checkout))
    assert set(seconds) == {"teacher", "align", "joint"}
    assert len(hits) == 3
    assert 0 < scores["nDCG@10"] <= 1
    assert (checkout.parent / "pairs" / "notebook" / "pair.toml").exists()


@pytest.mark.timeout(900)
def test_pairs_are_compared(checkout: Path) -> None:
    scores, milliseconds = map(ast.literal_eval, values("compare-pairs", checkout))
    pairs = {"care-mini", "care-mini-lookup"}
    assert set(scores) == set(milliseconds) == pairs
    assert all(0 < scores[pair]["nDCG@10"] <= 1 for pair in pairs)
    compared = checkout.parent / "builds" / "notebook-cmedteb"
    assert {path.name for path in compared.iterdir() if path.is_dir()} == pairs | {"bm25"}
