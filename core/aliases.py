"""Aliases: other names of indexes, each a symbolic link beside the folder of its index.

Whoever opens `<root>/<alias>` opens the index. A link is replaced atomically, so that each reader
sees one index or the other.
"""

import secrets
from pathlib import Path

from core.errors import IndexVersionError
from core.files import sync
from core.versions import IndexFolder


def index_of(folder: IndexFolder) -> str:
    """Returns the name of the index that a name means: itself, unless it is an alias."""
    try:
        return folder.path.readlink().name
    except OSError:  # it is a folder, or does not exist
        return folder.name


def read_aliases(root: Path) -> dict[str, str]:
    """Returns the index of each alias in the folder of all indexes."""
    links = sorted(path for path in root.glob("[!.]*") if path.is_symlink())
    return {link.name: link.readlink().name for link in links}


def set_alias(root: Path, alias: str, name: str) -> None:
    """Lets an alias mean an index, in place of what it meant before.

    Raises:
        IndexVersionError: If a name is not valid, the alias is the name of an index, the index is
            itself an alias, or it has no active version.
    """
    link, folder = IndexFolder(root, alias).path, IndexFolder(root, name)
    if link.exists() and not link.is_symlink():
        message = f"'{alias}' is an index in {root}, and cannot be an alias"
        raise IndexVersionError(message, code="alias_is_index", alias=alias)
    if folder.path.is_symlink():
        message = f"'{name}' is an alias of '{index_of(folder)}': name that index"
        raise IndexVersionError(message, code="index_is_alias", name=name)
    folder.active()
    temporary = link.with_name(f".{alias}.{secrets.token_hex(4)}.tmp")
    temporary.symlink_to(name, target_is_directory=True)
    temporary.replace(link)
    sync(root)


def remove_alias(root: Path, alias: str) -> None:
    """Removes an alias; IndexVersionError if there is none of this name."""
    link = IndexFolder(root, alias).path
    if not link.is_symlink():
        known = ", ".join(read_aliases(root)) or "none"
        message = f"'{alias}' is not an alias in {root}; its aliases are: {known}"
        raise IndexVersionError(message, code="unknown_alias", alias=alias)
    link.unlink()
    sync(root)
