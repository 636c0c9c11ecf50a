r"""Answers a question from the passages of a running service, with citations, or refuses.

    python examples/rag.py "高血压能喝咖啡吗" --min-score 0.8 \
        --chat http://127.0.0.1:8001/v1 --model NAME

The chat server is any with OpenAI's interface; OPENAI_API_KEY is its key. Needs care-client and
openai.
"""

import argparse
import os
import re
import sys
from dataclasses import dataclass

from openai import OpenAI

from care_client import Client, HitResponse

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
    question: str, search: Client, chat: OpenAI, model: str, *, min_score: float, top_k: int = 5
) -> Answer:
    """Answers from passages with at least `min_score`.

    It refuses if no passage has this score (the chat model is not called then), or if the model
    cites no passage, or one that it did not get.
    """
    hits = search.search(question, top_k=top_k, min_score=min_score).hits
    if not hits:
        return Answer(REFUSAL, {})
    passages = "\n\n".join(f"[{hit.rank}] {hit.title}\n{hit.text}" for hit in hits)
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
        "--min-score", type=float, required=True, help="`care evaluate` suggests one for an index"
    )
    options = parser.parse_args()
    chat = OpenAI(base_url=options.chat, api_key=os.environ.get("OPENAI_API_KEY", "none"))
    with Client(options.url) as search, chat:
        found = answer(options.question, search, chat, options.model, min_score=options.min_score)
    lines = [f"[{number}] {hit.id} {hit.title}" for number, hit in found.sources.items()]
    sys.stdout.write("\n".join([found.text, *lines, ""]))


if __name__ == "__main__":
    main()
