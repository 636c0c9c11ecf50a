"""Reads files as a build does."""

from dataclasses import dataclass, field
from pathlib import Path

from core.types import Document
from indexer.corpus import Reading, corpus_files, corpus_root, read_corpus
from indexer.readers.fields import FieldNames
from indexer.readers.source import Report
from indexer.records import Reject

FILES = Path(__file__).parent / "files"


@dataclass
class Found:
    documents: list[Document] = field(default_factory=list)
    rejects: dict[str, str] = field(default_factory=dict)  # reasons by place
    reports: list[Report] = field(default_factory=list)

    @property
    def texts(self) -> list[str]:
        return [document.text for document in self.documents]

    @property
    def ids(self) -> list[str]:
        return [document.id for document in self.documents]

    @property
    def titles(self) -> list[str]:
        return [document.title for document in self.documents]


def read(corpus: Path | str, fields: FieldNames | None = None, *, ocr: bool = False) -> Found:
    found = Found()
    reading = Reading(corpus_root(str(corpus)), fields or FieldNames(), ocr)
    files = corpus_files(str(corpus))
    for place, record in read_corpus(files, reading=reading, report=found.reports.append):
        if isinstance(record, Reject):
            found.rejects[str(place)] = record.reason
        else:
            found.documents.append(record)
    return found
