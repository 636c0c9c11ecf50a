"""Reading of the YAML files of the commands, with `${data}` and changes of the command line."""

from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from core.encoders import FrozenModel
from core.errors import CareError
from core.records import read_small_text
from core.yaml_text import parse_yaml

_CODES = {"extra_forbidden": "unknown_key", "missing": "missing_key"}

Config = TypeVar("Config", bound=FrozenModel)


def load_config(
    path: Path, kind: type[Config], *, data: Path | None = None, changes: Sequence[str] = ()
) -> Config:
    """Reads a YAML file with the keys of `kind`; its paths are relative to it.

    The key `data` is a folder, which replaces `${data}` in all texts of the file.

    Args:
        data: Replaces the key `data`; relative to the current folder.
        changes: `KEY=VALUE`, with a dotted key (`judges.0.model=m`) and a YAML value.
    """
    text = read_small_text(path)
    try:
        values = parse_yaml(text)
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise CareError.at(path, f"is not valid YAML: {reason}", "not_yaml") from error
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if root is None or not isinstance(values, dict):
        raise CareError.at(path, "has no keys: it must be a mapping", "no_keys")
    for change in changes:
        _change(values, change)
    folder = values.pop("data", None)
    if data or isinstance(folder, str):
        values = _substitute(values, str((data or path.parent / str(folder)).absolute()))
    try:
        return kind.model_validate(values, context=path.parent)
    except ValidationError as error:
        first = error.errors()[0]
        line, key = _locate(root, first["loc"])
        reason = first["msg"].removeprefix("Value error, ")
        reason = f"line {line}: {key}: {reason}" if key else f"is invalid: {reason}"
        code = _CODES.get(first["type"], "bad_value")
        raise CareError.at(path, reason, code, line=line if key else None, key=key) from error


def _change(values: Any, change: str) -> None:
    """Sets the value of a dotted key; entries of lists are addressed by their number, from 0."""
    name, equals, text = change.partition("=")
    *parents, last = name.split(".")
    try:
        value = parse_yaml(text)
        if not equals:
            raise ValueError
        for part in parents:
            values = values[int(part)] if isinstance(values, list) else values.setdefault(part, {})
        values[int(last) if isinstance(values, list) else last] = value
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        message = f"--set {change} is not KEY=VALUE with a dotted key that the file can have"
        raise CareError(message, code="bad_change", key=name) from error


def _substitute(value: Any, folder: str) -> Any:
    if isinstance(value, str):
        return Template(value).safe_substitute(data=folder)
    if isinstance(value, dict):
        return {key: _substitute(item, folder) for key, item in value.items()}
    return [_substitute(item, folder) for item in value] if isinstance(value, list) else value


def _locate(node: yaml.Node, location: tuple[int | str, ...]) -> tuple[int, str]:
    """Returns the line and the dotted name of a key; the line of its parent if it is missing."""
    line, names = node.start_mark.line + 1, []
    for part in location:
        if isinstance(node, yaml.MappingNode):
            found = [pair for pair in node.value if pair[0].value == str(part)]
            if not found:
                if any(part == value.value for _, value in node.value):
                    continue  # pydantic adds the tag of a union to the location
                names.append(str(part))
                break
            line, node = found[0][0].start_mark.line + 1, found[0][1]
        elif isinstance(node, yaml.SequenceNode) and part in range(len(node.value)):
            node = node.value[part]
            line = node.start_mark.line + 1
        else:
            break
        names.append(str(part))
    return line, ".".join(names)
