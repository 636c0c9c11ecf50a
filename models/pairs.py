"""The registry of pairs: one TOML file each, in `models/registry/` or anywhere."""

import os
import tomllib
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from core.encoders import EncoderSpec, Pair, Role
from core.errors import PairError
from core.files import write_text

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
        message = f"unknown pair '{name}': registered are {known}; or give the path of a .toml file"
        raise PairError(message, code="unknown_pair", pair=name) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PairError.at(path, f"is not valid TOML: {error}", "not_toml") from error
    try:
        return Pair(
            name=data["name"],
            description=data["description"],
            folder=path.parent,
            query=_spec(data, "query"),
            document=_spec(data, "document"),
        )
    except KeyError as error:
        field = error.args[0]
        raise PairError.at(path, f"lacks {field}", "missing_field", field=field) from error
    except TypeError as error:
        reason = "must have query and document as tables, without role or embedding_space"
        raise PairError.at(path, reason, "bad_table") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join([error.title, *map(str, first["loc"])])
        reason = f"has a wrong field {field}: {first['msg']}"
        raise PairError.at(path, reason, "bad_field", field=field) from error


def _spec(data: dict[str, Any], role: Role) -> EncoderSpec:
    return EncoderSpec(role=role, embedding_space=data["embedding_space"], **data[role])


def write_pair(pair: Pair, path: Path) -> None:
    """Writes the TOML file of a pair; local paths become relative to the file."""
    table = pair.model_dump(include={"name", "description"})
    table["embedding_space"] = pair.embedding_space
    for spec in (pair.query, pair.document):
        fields = spec.model_dump(exclude={"role", "embedding_space"}, exclude_defaults=True)
        for key in fields.keys() & _PATHS:
            local = pair.folder / fields[key]
            # An adapter that does not lie here is named as on the hub.
            if key != "adapter" or local.is_dir():
                fields[key] = Path(os.path.relpath(local, path.parent)).as_posix()
        table[spec.role] = fields
    write_text(path, tomli_w.dumps(table))
