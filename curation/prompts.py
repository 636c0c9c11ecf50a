"""What language models are told, in Chinese and English; the words are in prompts.yaml.

Texts go into the question as JSON strings: quotation marks in them cannot end them, and the
instruction says that they are material, whatever they ask for.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from curation.config import Language

_PROMPTS: dict[str, dict[Language, str]] = yaml.safe_load(
    Path(__file__).with_suffix(".yaml").read_text("utf-8")
)


def judge_prompt(language: Language) -> str:
    """Returns the instruction to grade passages."""
    return _PROMPTS["judge"][language]


def judge_question(query: str, passages: Sequence[str]) -> str:
    """Returns a question and its passages as JSON, as `read_judge_question` reads them."""
    named = {f"Passage-{i}": text for i, text in enumerate(passages)}
    return json.dumps({"question": query, "passages": named}, ensure_ascii=False, indent=1)


def read_judge_question(text: str) -> tuple[str, Mapping[str, str]]:
    """Returns the query, and the passages by name, of what `judge_question` returned."""
    data: dict[str, Any] = json.loads(text)
    return data["question"], data["passages"]


def rewrite_prompt(language: Language, shortest: int, longest: int) -> str:
    """Returns the instruction to rewrite a question within a length [characters]."""
    prompt = _PROMPTS["rewrite"][language]
    return prompt.replace("{shortest}", str(shortest)).replace("{longest}", str(longest))


def rewrite_question(question: str, term: str, synonym: str) -> str:
    """Returns a question, a term of it and the term's synonym, as JSON."""
    return json.dumps(
        {"question": question, "term": term, "synonym": synonym}, ensure_ascii=False, indent=1
    )


def again(language: Language) -> str:
    """Returns how a valid answer is asked for; `{complaint}` says what was wrong."""
    return _PROMPTS["again"][language]
