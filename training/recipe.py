"""Recipes: YAML files that describe encoders, data and training stages.

A recipe with `extends: FILE` inherits from another recipe: its mappings are merged into the
inherited ones, its lists replace them. A list whose entries have a `name` or `kind`, such as
`stages`, can also be changed by a mapping from entry names to

- a mapping, which is merged into the entry,
- null, which removes the entry, or
- a new entry with the key `before`, which names the entry to insert it before.

`${name}` is replaced by the value of `name` in `variables`.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from string import Template
from typing import Annotated, Any, Self

from pydantic import Field, ValidationError, model_validator

from core.encoders import Role
from core.records import parse_yaml, read_small_text
from training.errors import TrainingError
from training.schema import Dev, EncoderInit, Seed, Settings
from training.stages.contrastive import Contrastive, Joint, RetroMae, Unsupervised
from training.stages.late_interaction import LateInteraction
from training.stages.mine import Mine
from training.stages.prune import PruneLayers
from training.stages.teacher import Align, Distill, Teacher

AnyStage = Annotated[
    RetroMae
    | Unsupervised
    | Contrastive
    | PruneLayers
    | Teacher
    | Mine
    | Align
    | Joint
    | Distill
    | LateInteraction,
    Field(discriminator="kind"),
]


class Recipe(Settings):
    """A complete recipe."""

    # Name of the recipe and of the trained pair.
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    description: str = ""
    seeds: list[Seed] = Field(default=[0], min_length=1)  # the recipe is run once with each seed
    # Values of `${name}` in all strings of the recipe.
    variables: dict[str, str] = Field(default_factory=dict)
    query: EncoderInit | None = None  # initial checkpoint
    document: EncoderInit | None = None
    dev: Dev | None = None  # development set that stages are evaluated on
    stages: list[AnyStage] = Field(min_length=1)

    @model_validator(mode="after")
    def _check_unique_names(self) -> Self:
        names = [stage.label for stage in self.stages]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two stages are named '{twice[0]}': set a unique name for each")
        return self

    @property
    def encoders(self) -> dict[Role, EncoderInit]:
        """Initial checkpoints by side."""
        sides: dict[Role, EncoderInit | None] = {"query": self.query, "document": self.document}
        return {side: init for side, init in sides.items() if init is not None}


def load_recipe(path: Path, changes: Sequence[str] = ()) -> Recipe:
    """Loads a recipe with the recipes that it extends, and applies `changes`.

    A change is a dotted key, `=` and a YAML value, as in `stages.align.epochs=2`.
    """
    data = _load(path, ())
    for change in changes:
        data = _merge(data, _parse_change(change), "--set")
    variables = data.get("variables")
    data = _substitute(data, variables if isinstance(variables, dict) else {}, path)
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        unknown = [found for found in errors if found["type"] == "extra_forbidden"]
        # An unknown key comes first: a misspelt key also causes the error of a missing key.
        first = (unknown or errors)[0]
        reason = "unknown key" if unknown else first["msg"]
        code = "unknown_key" if unknown else "invalid_value"
        key = _key(first["loc"], data)
        raise TrainingError.at(path, f"{key}: {reason}", code, key=key) from error


def _entry_name(entry: Any, number: int) -> str:
    named = isinstance(entry, dict) and (entry.get("name") or entry.get("kind"))
    return str(named or number)


def _key(location: Iterable[int | str], data: Any) -> str:
    """Returns a key as in the file, with the names of stages instead of their positions."""
    keys: list[str] = []
    for part in location:
        if isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
            keys.append(_entry_name(data, part))
        elif isinstance(data, dict) and part in data:
            data = data[part]
            keys.append(str(part))
        # Pydantic inserts the kind of a stage into locations.
        elif not (isinstance(data, dict) and part == data.get("kind")):
            keys.append(str(part))
    return ".".join(keys) or "recipe"


def _load(path: Path, extended: tuple[Path, ...]) -> dict[str, Any]:
    if path.resolve() in extended:
        reason = "extends: the recipe extends itself, directly or through another recipe"
        raise TrainingError.at(path, reason, "circular_recipe")
    try:
        data = parse_yaml(read_small_text(path))
    except ValueError as error:
        raise TrainingError.at(path, f"not valid YAML: {error}", "not_yaml") from error
    if not isinstance(data, dict):
        raise TrainingError.at(path, "a recipe must be a mapping of keys", "not_a_mapping")
    base = data.pop("extends", None)
    if base is None:
        return data
    if not isinstance(base, str):
        reason = "extends: must be the path of one recipe"
        raise TrainingError.at(path, reason, "invalid_value", key="extends")
    return dict(_merge(_load(path.parent / base, (*extended, path.resolve())), data, path))


def _parse_change(change: str) -> dict[str, Any]:
    key, equals, value = change.partition("=")
    if not equals or not key:
        raise TrainingError.at(f"--set {change}", "must be KEY=VALUE", "invalid_change")
    try:
        nested = parse_yaml(value)
    except ValueError as error:
        reason = "the value is not valid YAML"
        raise TrainingError.at(f"--set {key}", reason, "invalid_change") from error
    for part in reversed(key.split(".")):
        nested = {part: nested}
    return dict(nested)


def _merge(base: Any, changes: Any, source: Path | str, key: str = "") -> Any:
    """Merges changes into a value: into mappings by key, into lists by the names of entries."""
    if isinstance(base, dict) and isinstance(changes, dict):
        return base | {
            name: _merge(base.get(name), change, source, f"{key}{name}.")
            for name, change in changes.items()
        }
    if not isinstance(base, list) or not isinstance(changes, dict):
        return changes
    entries = {_entry_name(entry, number): entry for number, entry in enumerate(base)}
    for name, change in ((str(name), change) for name, change in changes.items()):
        if name not in entries:
            entries = _insert(entries, name, change, source, f"{key}{name}")
        elif change is None:
            del entries[name]
        else:
            entries[name] = _merge(entries[name], change, source, f"{key}{name}.")
    return list(entries.values())


def _insert(
    entries: dict[str, Any], name: str, new: Any, source: Path | str, key: str
) -> dict[str, Any]:
    if not isinstance(new, dict) or "before" not in new:
        reason = f"{key}: no entry has this name; a new entry needs the key before"
        raise TrainingError.at(source, reason, "unknown_entry", key=key)
    new = {"name": name} | new
    following = str(new.pop("before"))
    if following not in entries:
        reason = f"{key}.before: no entry is named '{following}'"
        raise TrainingError.at(source, reason, "unknown_entry", key=f"{key}.before")
    items = list(entries.items())
    position = list(entries).index(following)
    return dict([*items[:position], (name, new), *items[position:]])


def _substitute(value: Any, variables: dict[str, str], path: Path) -> Any:
    if isinstance(value, str):
        try:
            return Template(value).substitute(variables)
        except (KeyError, ValueError) as error:
            reason = f"'{value}' refers to an unknown variable; variables defines: "
            reason += ", ".join(sorted(variables)) or "none"
            raise TrainingError.at(path, reason, "unknown_variable") from error
    if isinstance(value, dict):
        return {key: _substitute(item, variables, path) for key, item in value.items()}
    if isinstance(value, list):
        return [_substitute(item, variables, path) for item in value]
    return value
