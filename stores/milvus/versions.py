"""The collection of versions: small files of versions in Milvus, and the heads of indexes.

A row has a part of a JSON text, because a VARCHAR holds 65,535 bytes: the files of one folder. The
folder of a build has none of those whose content is in its collections. That of a write has the
files of its segment. The head of an index is one row: which version is active, the folders that it
needs, and which process writes. Its upsert is all that changes anything for services.
"""

import json
import re
from base64 import b64decode, b64encode
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self

from pymilvus import DataType, MilvusClient

from core.errors import IndexVersionError
from core.files import remove_folder, sync_folder, writing_in
from core.manifest import NAME as FILE_NAME
from core.scratch import temporary_folder
from core.versions import MANIFEST, IndexFolder
from stores.milvus.names import VERSIONS, head_name
from stores.milvus.tables import NO_VECTOR, create_table

NAME, PART, PARTS, TEXT = "name", "part", "parts", "text"
PART_FIELDS = [PART, PARTS, TEXT]
KEY = "key"
# The number of a head, which is no part.
HEAD = -1
# Characters of a part: they take 4 bytes each at most, and a VARCHAR holds 65,535.
_PART_CHARS = 16_000
_FILES, _BINARY = "files", "binary"
# Is in folders of writes that were fetched, and how long these are kept.
_PASSING, _KEPT = ".fetched", timedelta(hours=1)
_PATH = re.compile(f"({FILE_NAME}/)?{FILE_NAME}")


@dataclass(frozen=True, slots=True)
class Head:
    """What is active of an index: a version, and the folders that it needs, the base first."""

    version: str
    folders: tuple[str, ...]
    writer: str = ""  # the process that writes; "" for none

    @classmethod
    def of(cls, text: str) -> Self:
        content = json.loads(text)
        return cls(content["version"], tuple(content["folders"]), content["writer"])

    def row(self, index: str) -> dict[str, Any]:
        """Returns the row of an index that has this head."""
        return _row(head_name(index), head_name(index), HEAD, 0, json.dumps(asdict(self)))


def create_versions(client: MilvusClient) -> None:
    """Creates the collection of versions."""
    texts = dict.fromkeys((KEY, NAME, TEXT), DataType.VARCHAR)
    numbers = dict.fromkeys((PART, PARTS), DataType.INT64)
    create_table(client, VERSIONS, {**texts, **numbers, NO_VECTOR: DataType.FLOAT_VECTOR})


def folder_parts(collection: str, folder: Path) -> list[dict[str, Any]]:
    """Returns the rows that keep the files of a folder, under the name of its collection."""
    content: dict[str, dict[str, str]] = {_FILES: {}, _BINARY: {}}
    for path in sorted(folder.rglob("[!.]*")):
        if path.is_file():
            name, data = path.relative_to(folder).as_posix(), path.read_bytes()
            try:
                content[_FILES][name] = data.decode()
            except UnicodeDecodeError:
                content[_BINARY][name] = b64encode(data).decode()
    text = json.dumps(content, ensure_ascii=False)
    parts = [text[at : at + _PART_CHARS] for at in range(0, len(text), _PART_CHARS)]
    return [
        _row(f"{collection}/{at}", collection, at, len(parts), part)
        for at, part in enumerate(parts)
    ]


def _row(key: str, name: str, part: int, parts: int, text: str) -> dict[str, Any]:
    return {KEY: key, NAME: name, PART: part, PARTS: parts, TEXT: text, NO_VECTOR: [0.0]}


def write_fetched(
    index: IndexFolder, name: str, rows: Sequence[Mapping[str, Any]], *, passing: bool = False
) -> None:
    """Makes a folder of an index from its rows.

    Processes can do so at the same time: one of them makes the folder. One that is `passing` is
    removed by `remove_passing`.

    Raises:
        IndexVersionError: If a part is missing, or the text is not that of a folder of this name.
        CareError: If the folder cannot be written.
    """
    parts = {row[PART]: row[TEXT] for row in rows}
    reason = f"Milvus: collection '{VERSIONS}' has not all files of version {name} of index "
    wrong = IndexVersionError(
        f"{reason}'{index.name}': activate it again", code="unreadable_version", version=name
    )
    if len(parts) != rows[0][PARTS]:
        raise wrong
    try:
        content = json.loads("".join(parts[at] for at in range(len(parts))))
        files = {path: text.encode() for path, text in content[_FILES].items()}
        files |= {path: b64decode(text) for path, text in content[_BINARY].items()}
        if MANIFEST in files:
            known = json.loads(files[MANIFEST])
            if (known["name"], known["version"]) != (index.name, name):
                raise wrong
        if not all(map(_PATH.fullmatch, files)):
            raise wrong
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise wrong from error
    with writing_in(index.path):
        index.path.mkdir(parents=True, exist_ok=True)
        with temporary_folder(index.path) as temporary:
            folder = temporary / name
            for path, data in files.items():
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_bytes(data)
            if passing:
                (folder / _PASSING).touch()
            sync_folder(folder)
            with suppress(OSError):
                folder.rename(index.version(name))
        if not index.version(name).exists():  # else another process was faster
            raise wrong


def remove_passing(index: IndexFolder, needed: Collection[str]) -> None:
    """Removes folders of writes that were fetched, are older than an hour and not needed."""
    oldest = f"{datetime.now(UTC) - _KEPT:%Y%m%dT%H%M%S.%fZ}"
    for mark in index.path.glob(f"[!.]*/{_PASSING}"):
        if mark.parent.name not in needed and mark.parent.name < oldest:
            remove_folder(mark.parent)
