"""Pairs of encoders: loading and writing their TOML files.

A name is looked up among the trained pairs, `NAME/pair.toml` in the folder `CARE_PAIRS`, and then
in `models/registry/`.
"""

import os
import tomllib
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from core.choices import DEFAULT_PAIR as DEFAULT_PAIR
from core.choices import DEFAULT_PAIRS
from core.encoders import EncoderSpec, Pair, Role
from core.errors import PairError
from core.files import read_small, relative_path, write_text

REGISTRY = Path(__file__).parent / "registry"
PAIR = "pair.toml"
# Limit of the file of a pair [bytes].
_MAX_BYTES = 1 << 20
_PATHS = {"weights", "tokenizer", "adapter"}


def list_pairs() -> list[str]:
    return sorted(path.stem for path in REGISTRY.glob("*.toml"))


def pairs_folder() -> Path:
    """Returns the folder of trained pairs: `CARE_PAIRS`, by default "pairs"."""
    return Path(os.environ.get("CARE_PAIRS") or DEFAULT_PAIRS)


def load_pair(name: str, pairs: Path | None = None) -> Pair:
    """Loads a trained or registered pair by its name, or a pair from a TOML file.

    Args:
        name: Name of a trained or registered pair, or path of a file that ends with `.toml`. Paths
            of weights in the file are relative to its folder.
        pairs: Folder of trained pairs; by default `CARE_PAIRS` or "pairs".

    Raises:
        PairError: If the pair does not exist or a field is invalid.
    """
    trained = (pairs or pairs_folder()) / name / PAIR
    if name.endswith(".toml"):
        path = Path(name)
    else:
        path = trained if trained.is_file() else REGISTRY / f"{name}.toml"
    try:
        data = tomllib.loads(read_small(path, _MAX_BYTES).decode("utf-8-sig"))
    except OSError as error:
        if name.endswith(".toml"):
            reason = (
                f"{error.strerror}: give the path of a pair's TOML file, such as a run's pair.toml"
            )
            message = f"{name} cannot be read: {reason}"
        else:
            message = (
                f"unknown pair '{name}': {trained} does not exist, and the registered pairs are "
                f"{', '.join(list_pairs())}. A pair that you train gets this name by 'care export "
                f"--pair RUN/{PAIR} --out {trained.parent} --document merged', where RUN is the "
                "folder that 'care train RECIPE' writes; or give the path of a .toml file"
            )
        raise PairError(message, code="unknown_pair", pair=name) from error
    except (ValueError, RecursionError) as error:
        raise PairError.at(path, f"is not valid TOML: {error}", "not_toml") from error
    try:
        return Pair(
            name=data["name"],
            description=data["description"],
            folder=path.parent,
            query=_spec(data, "query"),
            document=_spec(data, "document"),
            fusion=data.get("fusion", {}),
            answerable=data.get("answerable", {}),
            late_interaction=data.get("late_interaction"),
        )
    except KeyError as error:
        field = error.args[0]
        raise PairError.at(
            path, f"has no field {field}: add it", "missing_field", field=field
        ) from error
    except TypeError as error:
        reason = "must have the tables query and document, without role and embedding_space"
        raise PairError.at(path, reason, "bad_table") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join([error.title, *map(str, first["loc"])])
        reason = f"has an invalid field {field}: {first['msg']}"
        raise PairError.at(path, reason, "bad_field", field=field) from error


def _spec(data: dict[str, Any], role: Role) -> EncoderSpec:
    return EncoderSpec(role=role, embedding_space=data["embedding_space"], **data[role])


def write_pair(pair: Pair, path: Path) -> None:
    """Writes the TOML file of a pair; local paths are written relative to its folder."""
    table = pair.model_dump(include={"name", "description"})
    table["embedding_space"] = pair.embedding_space
    if pair.fusion:
        table["fusion"] = dict(pair.fusion)
    if pair.answerable:
        table["answerable"] = {mode: judge.model_dump() for mode, judge in pair.answerable.items()}
    if pair.late_interaction:
        table["late_interaction"] = pair.late_interaction.model_dump()
    for spec in (pair.query, pair.document):
        fields = spec.model_dump(exclude={"role", "embedding_space"}, exclude_defaults=True)
        for key in fields.keys() & _PATHS:
            local = pair.folder / fields[key]
            # An adapter that is not a local folder is a name on the Hugging Face Hub.
            if key != "adapter" or local.is_dir():
                fields[key] = relative_path(local, path.parent).as_posix()
        table[spec.role] = fields
    write_text(path, tomli_w.dumps(table))
