"""What language models are told, in Chinese and English; the words are in prompts.yaml.

Texts go into the question as JSON strings: quotation marks in them cannot end them, and the
instruction says that they are material, whatever they ask for.
"""

import json
from pathlib import Path
from typing import Literal

import yaml

from curation.config import Language

_PROMPTS: dict[str, dict[Language, str]] = yaml.safe_load(
    Path(__file__).with_suffix(".yaml").read_text("utf-8")
)


def prompt(name: Literal["judge", "rewrite", "again"], language: Language) -> str:
    """Returns the instruction to judge or to rewrite, or how a valid answer is asked for again.

    Its places are `{shortest}` and `{longest}` of a rewrite [characters], `{complaint}` of again.
    """
    return _PROMPTS[name][language]


def question(**material: object) -> str:
    """Returns what a question is made of, as JSON."""
    return json.dumps(material, ensure_ascii=False, indent=1)
