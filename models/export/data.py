"""The texts that an export is measured with."""

from pathlib import Path

from core.errors import CareError
from core.text import document_text, normalize_text
from models.evaluation.beir import read_qrels, read_queries
from models.export.measurement import Judged
from models.jsonl import read_jsonl

_LINES = Path(__file__).parents[1] / "conversion" / "calibration.txt"


def read_calibration(path: Path | None) -> list[str]:
    """Returns typical queries, under the text rules.

    Args:
        path: JSONL with `text`, or None for the questions that the embedded pair is made with.

    Raises:
        CareError: If a line has no text.
    """
    if path is None:
        return _LINES.read_text(encoding="utf-8").splitlines()
    texts = []
    for number, record in read_jsonl(path):
        text = record.get("text")
        if not isinstance(text, str) or not normalize_text(text):
            raise CareError(f"{path} line {number}: text is missing, empty or no text")
        texts.append(normalize_text(text))
    if not texts:
        raise CareError(f"{path} is empty")
    return texts


def read_judged(corpus: Path, queries: Path, qrels: Path) -> Judged:
    """Reads what rankings are measured on, in the BEIR layout.

    Raises:
        CareError: If a line is wrong, or a judged query or document does not exist.
    """
    documents: dict[str, str] = {}
    for number, record in read_jsonl(corpus):
        where = f"{corpus} line {number}"
        id_, title, text = record.get("_id"), record.get("title") or "", record.get("text")
        if not isinstance(id_, str) or not isinstance(title, str) or not isinstance(text, str):
            raise CareError(f"{where} has no _id and text")
        if id_ in documents:
            raise CareError(f"{where}: _id '{id_}' is a duplicate")
        documents[id_] = document_text(title, text)
    texts, grades = read_queries(queries), read_qrels(qrels)
    if missing := grades.keys() - texts.keys():
        raise CareError(f"{qrels} judges query '{min(missing)}', which {queries} lacks")
    if missing := {id_ for found in grades.values() for id_ in found} - documents.keys():
        raise CareError(f"{qrels} judges document '{min(missing)}', which {corpus} lacks")
    if not grades:
        raise CareError(f"{qrels} judges no query")
    if wrong := [id_ for id_ in grades if not isinstance(texts[id_], str)]:
        raise CareError(f"{queries}: the text of '{wrong[0]}' is no text")
    return Judged(documents, {id_: normalize_text(texts[id_]) for id_ in grades}, grades)
