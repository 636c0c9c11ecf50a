"""data/medical-qa-zh-words: questions in patients' own words, and queries of few words."""

from pathlib import Path
from typing import Any

import pytest

from core.records import read_jsonl

FOLDER = Path("data/medical-qa-zh-words")
FILES = sorted(FOLDER.glob("*.jsonl"))


def records(path: Path) -> list[dict[str, Any]]:
    return [record for _, record in read_jsonl(path)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_texts_are_new_and_each_writer_wrote_one_of_a_question(path: Path) -> None:
    found = records(path)
    assert len({(one["_id"], one["writer"]) for one in found}) == len(found)
    assert len({one["text"] for one in found}) > 0.98 * len(found)
    for one in found:
        assert one["_id"].startswith("train-t") and one["text"] == one["text"].strip() != ""
        if path.stem.startswith("keywords"):
            assert len(one["text"]) <= 30 and one["meaning"]
            assert all(len(form) >= 2 for form in one.get("forms", ()))


@pytest.mark.parametrize("kind", ["rewrites", "keywords"])
def test_no_question_and_no_writer_trains_and_measures(kind: str) -> None:
    parts = {path.stem: records(path) for path in FILES if path.stem.startswith(kind)}
    for key in ("_id", "writer"):
        values = [{one[key] for one in found} for found in parts.values()]
        assert sum(map(len, values)) == len(set().union(*values))
