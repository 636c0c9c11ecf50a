"""Folders that are whole or not there."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from core.errors import TrainingError
from core.files import sync, writing_in


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Says in one sentence where the disk failed, also of weights: theirs is no OSError.

    Raises:
        CareError: In place of any OSError or SafetensorError.
    """
    try:
        with writing_in(folder):
            yield
    except SafetensorError as error:
        raise TrainingError(f"{folder}: {' '.join(str(error).split())}") from error


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yields a hidden folder that becomes `folder` when the block succeeds.

    What an earlier command left half-written is deleted first.

    Raises:
        CareError: If the disk fails.
    """
    temporary = folder.with_name(f".{folder.name}.tmp")
    with writing(folder):
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary
        publish(temporary, folder)


def publish(temporary: Path, folder: Path) -> None:
    """Renames a whole folder to its place, after its files have reached the disk."""
    for path in temporary.rglob("*"):
        sync(path)
    sync(temporary)
    temporary.rename(folder)
    sync(folder.parent)
