"""Prompts for language models; prompts.yaml has those that are sent unless a file replaces them.

By default a question and its passages follow the prompt as JSON, so that quotation marks cannot end
them. The prompts say that these texts are material and that requests in them are to be ignored.
"""

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from core.encoders import FrozenModel
from core.errors import CareError
from curation.config import Language, load_config

Name = Literal["judge", "classify", "rewrite"]

# The placeholders of each prompt. All have `{input}`, the material as JSON.
PLACEHOLDERS: dict[Name, tuple[str, ...]] = {
    "judge": ("query", "passages", "count"),
    "classify": ("query", "passages", "count"),
    "rewrite": ("query", "term", "synonym", "replaced", "shortest", "longest"),
}
# The fields of the answers, which `keys` of a prompt renames; those of `judge` are Passage-0 ….
FIELDS: dict[Name, tuple[str, ...]] = {
    "judge": (),
    "classify": ("positive", "negative"),
    "rewrite": ("same_with_synonym", "other_with_synonym", "other_without_synonym"),
}


class Prompt(FrozenModel):
    """A prompt: the system message and the user message, with placeholders in braces.

    Other braces are kept. A text instead of a mapping is the system message.
    """

    system: str = ""  # empty sends no system message
    user: str = "{input}"
    keys: dict[str, str] = Field(default_factory=dict)  # names of fields in answers, by our names

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, data: Any) -> Any:
        return {"system": data} if isinstance(data, str) else data

    def messages(self, material: Mapping[str, object], **more: object) -> tuple[str, str]:
        """Returns the system and the user message, with the material as JSON in place of `{input}`.

        `more` has the values of the other placeholders.
        """
        values = {"input": json.dumps(material, ensure_ascii=False, indent=1)} | more
        names = re.compile("{(" + "|".join(values) + ")}")
        system, user = (
            names.sub(lambda found: str(values[found[1]]), text)
            for text in (self.system, self.user)
        )
        return system, user


class _File(FrozenModel):
    judge: dict[Language, Prompt] = Field(default_factory=dict)
    classify: dict[Language, Prompt] = Field(default_factory=dict)
    rewrite: dict[Language, Prompt] = Field(default_factory=dict)
    again: dict[Language, str] = Field(default_factory=dict)

    @field_validator("judge", "classify", "rewrite")
    @classmethod
    def _names_the_material(
        cls, prompts: dict[Language, Prompt], info: ValidationInfo
    ) -> dict[Language, Prompt]:
        name: Any = info.field_name
        for language, prompt in prompts.items():
            wanted = [f"{{{field}}}" for field in PLACEHOLDERS[name][:2]]
            if "{input}" not in prompt.user and not all(field in prompt.user for field in wanted):
                raise ValueError(f"{language}: user must have {{input}}, or {' and '.join(wanted)}")
            if unknown := prompt.keys.keys() - set(FIELDS[name]):
                raise ValueError(f"{language}: keys: an answer has no field '{min(unknown)}'")
        return prompts

    @field_validator("again")
    @classmethod
    def _names_the_complaint(cls, texts: dict[Language, str]) -> dict[Language, str]:
        for language, text in texts.items():
            if "{complaint}" not in text:
                raise ValueError(f"{language}: must have {{complaint}}")
        return texts


class Prompts:
    """The prompts of a language; those that the file `path` does not have are the default ones."""

    def __init__(self, path: Path | None, language: Language) -> None:
        self._path, self._language = path, language
        self._own = _read(path) if path else _File()

    def get(self, name: Name) -> Prompt:
        prompt: Prompt = self._find(name)
        return prompt

    @property
    def again(self) -> str:
        """The message after an invalid answer, with the placeholder `{complaint}`."""
        text: str = self._find("again")
        return text

    def _find(self, name: str) -> Any:
        own = getattr(self._own, name)
        if self._path and own and self._language not in own:
            key = f"{name}.{self._language}"
            reason = f"{key} is missing: the language of the command is '{self._language}'"
            raise CareError.at(self._path, reason, "missing_key", key=key)
        return (own or getattr(_read(_DEFAULT), name))[self._language]


_DEFAULT = Path(__file__).with_suffix(".yaml")


@cache
def _read(path: Path) -> _File:
    return load_config(path, _File)
