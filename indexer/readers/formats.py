"""Formats of files by their suffix: how they are read, and what that needs."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import PurePath
from typing import Any


@dataclass(frozen=True, slots=True)
class Format:
    """How files of a format are read."""

    module: str
    function: str  # a `Reader`, or of an archive a function from its content to its members
    is_archive: bool = False
    unit: str = "section"  # what is counted in a file

    def load(self) -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(
            import_module(f"indexer.readers.{self.module}"), self.function
        )
        return function


_JSONL = Format("tables", "read_jsonl", unit="line")
_HTML = Format("html", "read_html")
_MARKDOWN = Format("html", "read_markdown")
_EXCEL = Format("tables", "read_excel", unit="row")
_TAR = Format("archives", "tar_members", is_archive=True)
FORMATS = {
    ".jsonl": _JSONL,
    ".jsonl.gz": Format("tables", "read_jsonl_gz", unit="line"),
    ".ndjson": _JSONL,
    ".parquet": Format("tables", "read_parquet", unit="line"),
    ".arrow": Format("tables", "read_arrow", unit="row"),
    ".csv": Format("tables", "read_csv", unit="line"),
    ".tsv": Format("tables", "read_tsv", unit="line"),
    ".json": Format("tables", "read_json", unit="item"),
    ".xlsx": _EXCEL,
    ".xlsm": _EXCEL,
    ".txt": Format("text", "read_plain"),
    ".md": _MARKDOWN,
    ".markdown": _MARKDOWN,
    ".html": _HTML,
    ".htm": _HTML,
    ".xhtml": _HTML,
    ".docx": Format("html", "read_word"),
    ".pdf": Format("pdf", "read_pdf", unit="page"),
    ".zip": Format("archives", "zip_members", is_archive=True),
    ".tar": _TAR,
    ".tar.gz": _TAR,
    ".tgz": _TAR,
    ".tar.bz2": _TAR,
    ".tar.xz": _TAR,
}
SHOWN = "JSONL, Parquet, Arrow, CSV, TSV, JSON, Excel, text, Markdown, HTML, Word, PDF, ZIP and tar"
# Formats that others are saved as.
_SAVED_AS = {
    **dict.fromkeys((".xls", ".ods", ".et", ".numbers"), ".xlsx"),
    **dict.fromkeys((".doc", ".odt", ".rtf", ".wps", ".pages"), ".docx"),
    **dict.fromkeys((".ppt", ".pptx", ".odp", ".dps", ".epub", ".ofd", ".caj", ".djvu"), ".pdf"),
    **dict.fromkeys((".png", ".jpg", ".jpeg", ".tif", ".tiff"), ".pdf"),
    **dict.fromkeys((".rar", ".7z"), ".zip"),
}


def format_of(name: str) -> Format | None:
    """Returns the format of a file by its suffix, in capital or small letters."""
    suffixes = [suffix.lower() for suffix in PurePath(name).suffixes[-2:]]
    return FORMATS.get("".join(suffixes)) or FORMATS.get("".join(suffixes[-1:]))


def advice(name: str) -> str:
    """Returns what to do with a file of a format that is not read."""
    suffix = PurePath(name).suffix.lower()
    if suffix in _SAVED_AS:
        return f"{suffix} is not read: save it as {_SAVED_AS[suffix]}"
    return f"is none of {SHOWN}: convert it"
