"""The term list of an index version: the list that was given, and what its full text uses of it."""

from pathlib import Path

from core.documents import DocumentReader
from core.errors import DataError, IndexVersionError
from core.files import sha256_file, write_text
from core.manifest import TERMS, Component, FileRecord, IndexManifest
from core.terms import TermList
from core.text import document_text

FORMAT = 1
GIVEN, USED = f"{TERMS}/given.tsv", f"{TERMS}/used.tsv"


def write_terms(folder: Path, given: TermList, documents: DocumentReader) -> Component:
    """Writes a term list, and the part of it that helps with these documents, to `folder`/terms.

    Returns its entry for the manifest.
    """
    used = given.for_documents(document_text(each.title, each.text) for each in documents)
    (folder / TERMS).mkdir()
    files = {}
    for name, terms in ((GIVEN, given), (USED, used)):
        path = folder / name
        write_text(path, terms.as_tsv())
        files[name] = FileRecord(bytes=path.stat().st_size, sha256=sha256_file(path))
    settings = {"given": len(given.terms), "used": len(used.terms)}
    return Component(format=FORMAT, files=files, settings=settings)


def read_terms(folder: Path, manifest: IndexManifest, name: str) -> TermList | None:
    """Reads a list of a version, `GIVEN` or `USED`; returns None if the version has none.

    Raises:
        IndexVersionError: If the component has another format, or the file cannot be read.
    """
    component = manifest.components.get(TERMS)
    if component is None:
        return None
    if component.format != FORMAT:
        reason = f"has format {component.format} instead of {FORMAT}: build the index again"
        raise IndexVersionError.at(folder / TERMS, reason, "unreadable_terms")
    try:
        return TermList.read(folder / name)
    except DataError as error:
        message = f"{error}: build the index again"
        raise IndexVersionError(message, code="unreadable_terms", path=folder / name) from error
