"""The texts that an export is measured with."""

from pathlib import Path

from core.errors import CareError
from core.text import document_text, normalize_text
from models.evaluation.beir import check_judged, read_documents, read_qrels, read_queries
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
    documents = {
        document.id: document_text(document.title, document.text)
        for document in read_documents(corpus)
    }
    texts, grades = read_queries(queries), read_qrels(qrels)
    check_judged(qrels, grades, texts, documents)
    if not grades:
        raise CareError(f"{qrels} judges no query")
    return Judged(documents, {id_: normalize_text(texts[id_]) for id_ in grades}, grades)
