"""Data of a stage on disk: read once by the main process, then opened by all.

OUT/data/<key>/            texts or examples; the key is a checksum of everything they depend on
    data.json              number of dropped records
    NAME.values, …         texts, keys and rows of `training.corpus`
    NAME-<key>/            token ids of texts: ids.values and ids.offsets
"""

import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TypeVar

import numpy as np

from core.files import publish
from core.locks import exclusive
from core.records import write_json
from training.corpus import Corpus, Text, TextSet, write_examples, write_texts
from training.data import stream_documents, stream_examples, stream_texts
from training.distributed import (
    from_main_process,
    main_process_first,
    processes,
    progress,
)
from training.encoder import EncoderCheckpoint, Tokens, tokenizer_key, write_tokens
from training.files import checksum, read_json
from training.schema import DataEntry
from training.stages.base import Context, data_inputs

T = TypeVar("T")

# Part of all keys; increase it when other texts are read from the same data.
_VERSION = 1
_FACTS = "data.json"


@dataclass(frozen=True)
class Prepared:
    """Texts or examples in a folder."""

    folder: Path

    @cached_property
    def texts(self) -> TextSet:
        """The texts of `prepare_texts`."""
        return TextSet.open(self.folder)

    @cached_property
    def corpus(self) -> Corpus:
        """The examples of `prepare_examples`."""
        return Corpus.open(self.folder)

    @property
    def held_out(self) -> int:
        """Number of dropped examples or texts."""
        return int(read_json(self.folder / _FACTS)["held_out"])

    def tokens(
        self, name: str, texts: Sequence[str], checkpoint: EncoderCheckpoint, prompt: str
    ) -> Tokens:
        """Returns the token ids of the texts `name` with a prompt; all processes must call it."""
        folder = self.folder / f"{name}-{tokenizer_key(checkpoint, prompt)[:12]}"
        make_once(folder, lambda path: write_tokens(path, "ids", checkpoint, prompt, texts))
        return Tokens.open(folder, "ids", np.int32)


def prepare_texts(context: Context, entries: Sequence[DataEntry]) -> Prepared:
    """Returns the texts of data entries; all processes must call it."""

    def write(folder: Path, counts: Counter[str]) -> None:
        texts = stream_texts(entries, context.held_out, context.mined, counts)
        write_texts(folder, _shown(texts, "texts"))

    return _prepare(context, "texts", entries, write)


def prepare_examples(context: Context, entries: Sequence[DataEntry]) -> Prepared:
    """Returns the examples of data entries; all processes must call it."""

    def write(folder: Path, counts: Counter[str]) -> None:
        examples = stream_examples(entries, context.held_out, context.mined, counts)
        write_examples(folder, _shown(examples, "examples"))

    return _prepare(context, "examples", entries, write)


def prepare_documents(context: Context, entries: Sequence[DataEntry]) -> Prepared:
    """Returns the documents of the examples, as `prepare_examples`, and then all others."""
    corpus = prepare_examples(context, entries).corpus

    def write(folder: Path, _: Counter[str]) -> None:
        documents = chain(corpus.documents, stream_documents(entries, context.mined))
        texts = (Text("document", document) for document in documents)
        write_texts(folder, _shown(texts, "documents"))

    return _prepare(context, "documents", entries, write)


def make_once(folder: Path, make: Callable[[Path], None]) -> None:
    """Makes a folder in the main process unless it exists; the other processes wait for it.

    `make` fills an empty folder, which is renamed. Other runs wait, and use the same folder.
    """
    with main_process_first():
        if folder.is_dir() or not processes().is_main_process:
            return
        lock = f".{folder.name}.lock"
        with exclusive(folder.parent, f"write {folder.name}", lock, wait=float("inf")):
            if not folder.is_dir():
                partial = folder.with_name(f".{folder.name}.partial")
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir()
                make(partial)
                publish(partial, folder)
            (folder.parent / lock).unlink()


def _prepare(
    context: Context,
    kind: str,
    entries: Sequence[DataEntry],
    write: Callable[[Path, Counter[str]], None],
) -> Prepared:
    def key() -> str:
        return checksum({"version": _VERSION, "kind": kind, **data_inputs(context, entries)})[:16]

    folder = context.data / from_main_process(key)

    def make(partial: Path) -> None:
        counts = Counter(held_out=0)
        write(partial, counts)
        write_json(partial / _FACTS, counts)

    make_once(folder, make)
    return Prepared(folder)


def _shown(items: Iterable[T], label: str) -> Iterable[T]:
    """Shows the progress of reading."""
    with progress(None, f"read {label}", label.removesuffix("s")) as bar:
        for item in items:
            yield item
            bar.update()
