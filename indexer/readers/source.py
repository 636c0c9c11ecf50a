"""What a reader gets and gives: a file, its records, and a report of how it is read."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO

from indexer.readers.fields import FieldNames

# The number of a row, page or section from 1, or 0 for the whole file; and a record with the fields
# of a JSONL corpus, or the reason why there is none.
Item = tuple[int, dict[str, Any] | str]


class UnreadableError(Exception):
    """A file cannot be read; the message follows its name, and says what to do."""

    def __init__(self, reason: str, code: str = "unreadable") -> None:
        super().__init__(reason)
        self.code = code


@dataclass(frozen=True, slots=True)
class Report:
    """How a file is read."""

    name: str
    format: str  # as a user calls it
    encoding: str = ""  # of a text file that is not plain UTF-8
    fields: FieldNames | None = None  # of a table
    guessed: bool = False  # whether one of the fields was not given
    sheet: str = ""

    def __str__(self) -> str:
        how = ", ".join(filter(None, (self.format, self.encoding, self.sheet)))
        fields = f": {self.fields}" if self.fields else ""
        return f"{self.name} ({how}){fields}"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Report":
        fields = values["fields"] and FieldNames.from_json(values["fields"])
        return cls(**values | {"fields": fields})


@dataclass(frozen=True, slots=True)
class Source:
    """A file to read.

    `name` is its path below the corpus, with which generated ids begin; `report` takes a report
    before the first of the records that it is about. `ocr` says whether text of images is
    recognized, for which `more_time` is called before each page.
    """

    name: str
    stream: BinaryIO
    fields: FieldNames
    report: Callable[[Report], None]
    ocr: bool
    more_time: Callable[[], None]


Reader = Callable[[Source], Iterator[Item]]
