"""The registry of pairs: one TOML file each, in `models/registry/` or anywhere."""

import json
import os
import tomllib
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from core.errors import PairError
from core.files import write_text
from core.types import EncoderSpec, Pair, Role

REGISTRY = Path(__file__).parent / "registry"
DEFAULT_PAIR = "care-mini"
_PATHS = {"weights", "tokenizer", "adapter"}


def list_pairs() -> list[str]:
    """Returns the names of the registered pairs."""
    return sorted(path.stem for path in REGISTRY.glob("*.toml"))


def load_pair(name: str) -> Pair:
    """Loads a pair by its registered name or from the path of a TOML file.

    Paths of weights and tokenizers in the file are relative to the file.

    Raises:
        PairError: If there is no such pair or a field of it is wrong.
    """
    path = Path(name) if name.endswith(".toml") else REGISTRY / f"{name}.toml"
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        known = ", ".join(list_pairs())
        raise PairError(
            f"unknown pair '{name}': registered are {known}; or give the path of a .toml file"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PairError(f"{path} is not valid TOML: {error}") from error
    try:
        return Pair(
            name=data["name"],
            description=data["description"],
            folder=path.parent,
            query=_spec(data, "query"),
            document=_spec(data, "document"),
        )
    except KeyError as error:
        raise PairError(f"{path}: {error.args[0]} is missing") from error
    except TypeError as error:
        raise PairError(
            f"{path}: query and document are tables, without role or embedding_space"
        ) from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join([error.title, *map(str, first["loc"])])
        raise PairError(f"{path}: {field}: {first['msg']}") from error


def _spec(data: dict[str, Any], role: Role) -> EncoderSpec:
    return EncoderSpec(role=role, embedding_space=data["embedding_space"], **data[role])


def write_pair(pair: Pair, path: Path) -> None:
    """Writes the TOML file of a pair; local paths become relative to the file.

    Args:
        pair: The pair; paths in it are relative to its folder.
        path: The file to write.
    """
    lines = [f"{key} = {_toml(getattr(pair, key))}" for key in ("name", "description")]
    lines.append(f"embedding_space = {_toml(pair.embedding_space)}")
    for spec in (pair.query, pair.document):
        fields = spec.model_dump(exclude={"role", "embedding_space"}, exclude_defaults=True)
        for key in fields.keys() & _PATHS:
            local = pair.folder / fields[key]
            # What does not lie here as an adapter is the name of one on the hub.
            if key != "adapter" or local.is_dir():
                fields[key] = Path(os.path.relpath(local, path.parent)).as_posix()
        lines += ["", f"[{spec.role}]", *(f"{key} = {_toml(x)}" for key, x in fields.items())]
    write_text(path, "\n".join([*lines, ""]))


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{json.dumps(key)} = {_toml(x)}' for key, x in value.items())} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    # What is left of JSON, strings and their escapes too, is TOML.
    return json.dumps(value, ensure_ascii=False)
