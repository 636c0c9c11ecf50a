"""Judges that agree on the documents of `conftest`, except for one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.curation.conftest import DOCUMENTS, QUERIES
from tests.curation.endpoints import Recorder, endpoint, grader, scripted_server

# Relevant pairs; the third judge grades d5 differently.
ANSWERS = {("q1", "d1"), ("q1", "d5"), ("q2", "d4")}
IDS = {text: id_ for id_, text in (DOCUMENTS | QUERIES).items()}


def grade(model: str, query: str, text: str) -> str:
    pair = IDS[query], IDS[text]
    if model == "third" and pair == ("q1", "d5"):
        return "B"
    return "A" if pair in ANSWERS else "C"


def run(
    kind: type, command: Callable[[Any], dict[str, Any]], facts: dict[str, Any], *judges: str
) -> tuple[dict[str, Any], Recorder]:
    recorder = Recorder(grader(grade))
    with scripted_server(recorder) as url:
        endpoints = [endpoint(url, name) for name in judges]
        statistics = command(kind.model_validate(facts | {"judges": endpoints}))
    return statistics, recorder


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


THREE = ("first", "second", "third")
