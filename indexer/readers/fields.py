"""Which fields of a table are the id, title, text and metadata of its documents."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

# Names that tables use, the most telling first.
_IDS = ("_id", "id", "doc_id", "docid", "document_id", "pid", "uuid", "编号", "文档编号", "文档id")
_TITLES = (
    *("title", "标题", "题目", "主题", "名称", "病名", "疾病名称", "药品名称"),
    *("question", "query", "问题", "提问", "headline", "subject", "name"),
)
_TEXTS = (
    *("text", "正文", "内容", "文本", "content", "contents", "body", "passage", "全文"),
    *("answer", "答案", "回答", "答复", "解答", "document", "详情", "描述", "说明"),
    *("description", "abstract", "摘要", "response", "output"),
)
# Without a known name, a column of texts has at least this mean length [characters].
_MIN_TEXT = 10


@dataclass(frozen=True, slots=True)
class FieldNames:
    """Names of the fields of a table; None for those that are not given.

    Without an id, a document is named by its file and the number of its row. `metadata` None takes
    all other fields.
    """

    id: str | None = None
    title: str | None = None
    text: str | None = None
    metadata: tuple[str, ...] | None = None

    def __bool__(self) -> bool:
        return self != FieldNames()

    def __str__(self) -> str:
        metadata = "all others" if self.metadata is None else ", ".join(self.metadata) or "none"
        return (
            f"id {self.id or 'from file and row'}, title {self.title or 'none'}, "
            f"text {self.text}, metadata {metadata}"
        )

    @property
    def named(self) -> list[str]:
        return [name for name in (self.id, self.title, self.text, *(self.metadata or ())) if name]

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "FieldNames":
        metadata = values["metadata"]
        return cls(**{**values, "metadata": None if metadata is None else tuple(metadata)})


def known_text(columns: Sequence[str]) -> str | None:
    """Returns the column that has the name of a text, if there is one."""
    return _known(columns, _TEXTS)


def known_id(columns: Sequence[str]) -> str | None:
    """Returns the column that has the name of an id, if there is one."""
    return _known(columns, _IDS)


def guess_fields(
    given: FieldNames, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]
) -> FieldNames | None:
    """Returns the fields of a table: the given ones, then known names, then the longest texts.

    All of them are named; None if no column can be the text.
    """
    free = [name for name in columns if name not in given.named]
    text = given.text or known_text(free) or _longest(free, rows)
    if text is None:
        return None
    free = [name for name in free if name != text]
    id_ = given.id or known_id(free)
    if id_ and not given.id and not _is_key(id_, rows):
        id_ = None
    title = given.title or _known([name for name in free if name != id_], _TITLES)
    metadata = given.metadata
    if metadata is None:
        metadata = tuple(name for name in columns if name not in (id_, title, text))
    return replace(given, id=id_, title=title, text=text, metadata=metadata)


def _known(columns: Sequence[str], names: Sequence[str]) -> str | None:
    by_name = {name.strip().casefold(): name for name in reversed(columns)}
    return next((by_name[name] for name in names if name in by_name), None)


def _longest(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str | None:
    def mean_length(name: str) -> float:
        values = [row.get(name) for row in rows]
        return sum(len(value) for value in values if isinstance(value, str)) / max(len(values), 1)

    best = max(columns, key=mean_length, default=None)
    return best if best is not None and mean_length(best) >= _MIN_TEXT else None


def _is_key(name: str, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Returns whether the rows have different values of a field, none of them missing."""
    values = [row.get(name) for row in rows]
    return all(value not in (None, "") for value in values) and len(
        {str(value) for value in values}
    ) == len(values)
