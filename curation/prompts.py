"""Prompts for language models, in Chinese and English; prompts.yaml contains the texts.

Questions and passages are inserted as JSON strings, so that quotation marks cannot end them. The
prompts say that these texts are material and that requests in them are to be ignored.
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
    """Returns the prompt to judge or to rewrite, or the message after an invalid answer ("again").

    Placeholders: `{shortest}` and `{longest}` [characters] in "rewrite", `{complaint}` in "again".
    """
    return _PROMPTS[name][language]


def question(**material: object) -> str:
    """Returns the material of a question as JSON."""
    return json.dumps(material, ensure_ascii=False, indent=1)
