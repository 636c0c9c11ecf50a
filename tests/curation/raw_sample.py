"""The texts of data/sample/raw, and a scripted language model that knows their answers."""

import json
from collections.abc import Callable
from pathlib import Path

from curation.cleaning import clean
from evaluation.beir import read_documents, read_queries
from tests.curation.endpoints import Body, Respond, grader

RAW = Path(__file__).parents[2] / "data" / "sample" / "raw"
# Keys of the language models in the YAML file of each command.
ENDPOINTS = {
    "build-benchmark": ["judges.0", "judges.1"],
    "annotate": ["judges.0"],
    "sts": ["writer"],
}


def read_raw() -> tuple[dict[str, str], dict[str, str]]:
    documents = {d.id: d.text for d in read_documents(RAW / "corpus.jsonl")}
    return read_queries(RAW / "queries.jsonl"), documents


def make_judge() -> Callable[[str, str, str], str]:
    """Returns a judge that grades the answers of a question S, everything else C."""
    queries, answers = read_raw()
    own: dict[str, set[str]] = {}
    for id_, query in queries.items():
        answer = clean(answers[id_], anonymous=True)
        own.setdefault(clean(query, anonymous=True), set()).add(answer)
    return lambda _, query, passage: "S" if passage in own[query] else "C"


def rewrite(term: str, synonym: str, question: str) -> dict[str, str]:
    other = question.replace("怎么", "为何")[:-1] + "啊"
    same = question.replace(term, synonym)
    return {
        "same_with_synonym": same,
        "other_with_synonym": other.replace(term, synonym),
        "other_without_synonym": other,
    }


def language_model() -> Respond:
    """Returns the answers of a language model that judges passages and rewrites questions."""
    judge = grader(make_judge())

    def respond(body: Body, *rest: object) -> str:
        material = json.loads(body["messages"][1]["content"])
        return judge(body, *rest) if "passages" in material else json.dumps(rewrite(**material))

    return respond
