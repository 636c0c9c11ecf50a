"""The collection of versions: manifest and small files of each whole version in Milvus.

A row has a part of a JSON text, because a VARCHAR holds 65,535 bytes. The alias of an index says
which of its versions is active.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pymilvus import DataType, MilvusClient

from core.errors import IndexVersionError
from core.files import sync_folder, write_text, writing_in
from core.manifest import TERMS, IndexManifest
from core.scratch import temporary_folder
from core.versions import CURRENT, IndexFolder, write_new_manifest
from stores.milvus.names import COLLECTION, VERSIONS
from stores.milvus.tables import NO_VECTOR, create_table

NAME, PART, PARTS, TEXT = "name", "part", "parts", "text"
PART_FIELDS = [PART, PARTS, TEXT]
_KEY = "key"
# Characters of a part: they take 4 bytes each at most, and a VARCHAR holds 65,535.
_PART_CHARS = 16_000


def create_versions(client: MilvusClient) -> None:
    """Creates the collection of versions."""
    texts = dict.fromkeys((_KEY, NAME, TEXT), DataType.VARCHAR)
    numbers = dict.fromkeys((PART, PARTS), DataType.INT64)
    create_table(client, VERSIONS, {**texts, **numbers, NO_VECTOR: DataType.FLOAT_VECTOR})


def version_parts(collection: str, folder: Path, manifest: IndexManifest) -> list[dict[str, Any]]:
    """Returns the rows that keep the version in a folder, whose vectors a collection has."""
    without = {
        name: one if name == TERMS else one.model_copy(update={"files": {}})
        for name, one in manifest.components.items()
    }
    files = {COLLECTION: manifest.files[COLLECTION]}
    manifest = manifest.model_copy(update={"files": files, "components": without})
    texts = {name: (folder / name).read_text("utf-8") for name in manifest.all_files}
    content = {"manifest": json.loads(manifest.model_dump_json()), "files": texts}
    text = json.dumps(content, ensure_ascii=False)
    parts = [text[at : at + _PART_CHARS] for at in range(0, len(text), _PART_CHARS)]
    return [
        {_KEY: f"{collection}/{at}", NAME: collection, NO_VECTOR: [0.0]}
        | {PART: at, PARTS: len(parts), TEXT: part}
        for at, part in enumerate(parts)
    ]


def write_fetched(index: IndexFolder, version: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Makes the folder of a version from its rows, and names it in `CURRENT`.

    Processes can do so at the same time: one of them makes the folder.

    Raises:
        IndexVersionError: If a part is missing, or the text is not that of a version.
        CareError: If the folder cannot be written.
    """
    parts = {row[PART]: row[TEXT] for row in rows}
    reason = f"Milvus: collection '{VERSIONS}' has no whole manifest of version {version} of index "
    wrong = IndexVersionError(
        f"{reason}'{index.name}': activate it again", code="unreadable_version", version=version
    )
    if len(parts) != rows[0][PARTS]:
        raise wrong
    try:
        content = json.loads("".join(parts[at] for at in range(len(parts))))
        manifest = IndexManifest.model_validate(content["manifest"])
        # These are names of files, which the manifest has checked.
        names = manifest.name, manifest.version, set(content["files"])
        if names != (index.name, version, set(manifest.all_files)):
            raise wrong
    except (ValueError, ValidationError, LookupError, TypeError) as error:
        raise wrong from error
    with writing_in(index.path):
        index.path.mkdir(parents=True, exist_ok=True)
        with temporary_folder(index.path) as temporary:
            folder = temporary / version
            folder.mkdir()
            for name, text in content["files"].items():
                (folder / name).parent.mkdir(exist_ok=True)
                (folder / name).write_text(text, encoding="utf-8")
            write_new_manifest(folder, manifest)
            sync_folder(folder)
            try:
                folder.rename(index.version(version))
            except OSError:
                if not index.version(version).exists():  # else another process was faster
                    raise
        write_text(index.path / CURRENT, version + "\n")
