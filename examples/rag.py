r"""Answers a question from the passages of a running service, with citations, or refuses.

    python examples/rag.py "高血压能喝咖啡吗" --chat http://127.0.0.1:8001/v1 --model NAME

The chat server is any with OpenAI's interface; OPENAI_API_KEY is its key. Needs care-client and
openai.
"""

import argparse
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from openai import OpenAI

from care_client import Client, HitResponse, SearchOptions

REFUSAL = "资料中没有能回答这个问题的内容。"
SYSTEM = (
    "你根据编号的资料回答医学问题。只使用资料中的内容，每句话后用方括号注明资料编号，例如[1]。"
    f"资料不能回答问题时，只回答：{REFUSAL}"
)


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer and the passages that it cites, by the number of the citation."""

    text: str
    sources: dict[int, HitResponse]


def answer(
    question: str,
    search: Client,
    chat: OpenAI,
    model: str,
    *,
    thresholds: Mapping[str, float],
    min_score: float | None = None,
    top_k: int = 5,
) -> Answer:
    """Answers from passages, of at least `min_score` if it is given.

    It refuses if nothing in the index seems to answer by the `thresholds` of the modes, or no
    passage has `min_score` (the chat model is not called then), or if the model cites no passage,
    or one that it did not get.
    """
    options: SearchOptions = {"top_k": top_k}
    if min_score is not None:
        options["min_score"] = min_score
    found = search.search(question, **options)
    hits, score = found.hits, found.answerable
    if not hits or (score is not None and score < thresholds.get(found.mode, 0.0)):
        return Answer(REFUSAL, {})
    passages = "\n\n".join(f"[{hit.rank}] " + f"{hit.title}\n{hit.text}".strip() for hit in hits)
    completion = chat.chat.completions.create(
        model=model,
        temperature=0,
        messages=[
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"资料：\n{passages}\n\n问题：{question}"},
        ],
    )
    text = completion.choices[0].message.content or ""
    given = {hit.rank: hit for hit in hits}
    cited = {int(number) for number in re.findall(r"\[(\d+)\]", text)}
    if not cited or not cited <= set(given):
        return Answer(REFUSAL, {})
    return Answer(text, {number: given[number] for number in sorted(cited)})


def main() -> None:
    """Prints the answer and its sources."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the service")
    parser.add_argument("--chat", required=True, help="address of the chat server, up to /v1")
    parser.add_argument("--model", required=True, help="name of the chat model")
    parser.add_argument(
        "--min-score",
        type=float,
        help="lowest score of a passage, needed if the index has no threshold of `answerable`; "
        "`care evaluate` suggests one",
    )
    options = parser.parse_args()
    chat = OpenAI(base_url=options.chat, api_key=os.environ.get("OPENAI_API_KEY", "none"))
    with Client(options.url) as search, chat:
        thresholds = search.index().answerable_thresholds
        if not thresholds and options.min_score is None:
            parser.error("the index has no threshold of `answerable`: give --min-score")
        found = answer(
            options.question,
            search,
            chat,
            options.model,
            thresholds=thresholds,
            min_score=options.min_score,
        )
    lines = [f"[{number}] {hit.id} {hit.title}".rstrip() for number, hit in found.sources.items()]
    sys.stdout.write("\n".join([found.text, *lines, ""]))


if __name__ == "__main__":
    main()
