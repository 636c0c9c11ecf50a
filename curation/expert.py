"""The expert check: a sample of pairs as a spreadsheet, and the expert's labels beside the judges'.

The pairs are agreed ones of a benchmark, or false negatives of an audit.
"""

import csv
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from openpyxl import Workbook, load_workbook
from openpyxl.styles import Alignment
from openpyxl.utils.exceptions import InvalidFileException
from openpyxl.worksheet.datavalidation import DataValidation
from statsmodels.stats.proportion import proportion_confint

from core.errors import CareError, DataError
from core.files import atomic
from core.records import read_jsonl, record_error, string, unreadable, write_csv, write_jsonl
from curation.agreement import kappa
from curation.benchmark import CORPUS, FALSE_NEGATIVES, STATISTICS
from curation.common import output_folder, sample_key
from curation.judging import JUDGEMENTS
from evaluation.beir import document_texts, read_documents, read_queries

KEY = "key.jsonl"
SHEET = "pairs"
HEADER = ("pair", "query", "passage", "label", "error", "comment")
# Why a passage that the judges call relevant is not: what an expert writes beside the label 0.
ERRORS = {
    "subject": "is about another disease, drug, test or group of patients",
    "intent": "has the subject of the question and answers another question",
    "part": "says too little to answer the question, or answers a part of it",
    "wrong": "answers the question, but is medically wrong, outdated or unsafe",
    "question": "the question cannot be answered: unclear, or several at once",
    "text": "is an advertisement, or not readable",
}


def expert_sample(folder: Path, output: Path, size: int, seed: int) -> int:
    """Writes a sample of pairs as pairs.csv and pairs.xlsx, and their key, to the folder `output`.

    Of a benchmark, the pairs on which the judges agree; of an audit, the false negatives, which all
    judges call relevant. The spreadsheets contain no labels, ids or ranks. key.jsonl maps pairs to
    ids and verdicts; do not send it to the expert.

    Returns:
        The number of pairs: `size`, or all if there are fewer.
    """
    if not (folder / STATISTICS).is_file():
        reason = f"has no {STATISTICS}: run build-benchmark or audit to its end first"
        raise CareError.at(folder, reason, "incomplete_benchmark")
    audited = (folder / FALSE_NEGATIVES).is_file()
    pairs = _false_negatives(folder) if audited else _agreed(folder)
    pairs.sort(key=lambda pair: sample_key(seed, "expert", pair["query-id"], pair["corpus-id"]))
    sample = [{"pair": number} | pair for number, pair in enumerate(pairs[:size], start=1)]
    rows = [(pair["pair"], pair.pop("query"), pair.pop("passage"), "", "", "") for pair in sample]
    with output_folder(output):
        for name in ("pairs.csv", "pairs.xlsx", KEY):
            if (output / name).exists():
                reason = "exists: choose another --output"
                raise CareError.at(output / name, reason, "output_exists")
        write_csv(output / "pairs.csv", [HEADER, *rows])
        _write_xlsx(output / "pairs.xlsx", rows)
        write_jsonl(output / KEY, sample)
    return len(sample)


def _agreed(benchmark: Path) -> list[dict[str, Any]]:
    path = benchmark / JUDGEMENTS
    documents = document_texts(read_documents(benchmark / CORPUS))
    queries = read_queries(benchmark / "queries.jsonl")
    return [
        {name: string(path, number, record, name) for name in ("query-id", "corpus-id", "verdict")}
        | {"query": queries[record["query-id"]], "passage": documents[record["corpus-id"]]}
        for number, record in read_jsonl(path)
        if record.get("verdict") in ("positive", "negative")
    ]


def _false_negatives(audit: Path) -> list[dict[str, Any]]:
    return [
        {"query-id": record["query-id"], "corpus-id": record["corpus-id"], "verdict": "positive"}
        | {"query": record["query"], "passage": record["text"]}
        for _, record in read_jsonl(audit / FALSE_NEGATIVES)
    ]


def _write_xlsx(path: Path, rows: Iterable[tuple[object, ...]]) -> None:
    book = Workbook()
    sheet = book.active
    sheet.title = SHEET
    sheet.append(HEADER)
    sheet.freeze_panes = "A2"
    for row in rows:
        sheet.append(row)
        for cell in sheet[sheet.max_row]:
            cell.alignment = Alignment(wrap_text=True, vertical="top")
            if isinstance(cell.value, str):
                cell.data_type = "s"  # never a formula
    for column, width in {"A": 8, "B": 40, "C": 100, "D": 8, "E": 12, "F": 30}.items():
        sheet.column_dimensions[column].width = width
    for column, values in {"D": "1,0", "E": ",".join(ERRORS)}.items():
        choice = DataValidation(type="list", formula1=f'"{values}"', allow_blank=True)
        sheet.add_data_validation(choice)
        choice.add(f"{column}2:{column}{max(2, sheet.max_row)}")
    meanings = book.create_sheet("errors")
    for item in (("error", "the passage …"), *ERRORS.items()):
        meanings.append(item)
    with atomic(path) as temporary:
        book.save(temporary)


def expert_agreement(labels: Path, key: Path) -> dict[str, Any]:
    """Compares the labels of a spreadsheet, CSV or XLSX, with the verdicts of the judges.

    A label is 1 if the passage answers the question directly, 0 if not, and empty if the expert
    cannot say. Beside 0 the column `error` may have a name of `ERRORS`. Other values are a
    DataError. `key` is the file that `expert_sample` wrote.

    Returns:
        Counts, agreement and Cohen's kappa; `confirmed`, the share of the judges' positives that
        the expert labels 1, with its 95 % Wilson interval; and `errors`, counts of the column
        `error` among the other positives.
    """
    consensus: dict[str, str] = {}
    for number, record in read_jsonl(key):
        if "pair" not in record:
            reason = "has no field 'pair': give the key.jsonl that expert-sample wrote"
            raise record_error(key, number, reason, code="not_key")
        consensus[str(record["pair"])] = string(key, number, record, "verdict")
    given: dict[str, int] = {}
    errors: Counter[str] = Counter()
    for number, row in _spreadsheet(labels):
        pair, label = row.get("pair", ""), row.get("label", "")
        if not pair and not label:
            continue
        if pair not in consensus:
            raise _row_error(labels, number, f"{key} has no pair '{pair}'", "unknown_pair")
        if pair in given:
            raise _row_error(labels, number, f"pair '{pair}' is a duplicate", "duplicate_id")
        if label not in ("1", "0", ""):
            reason = f"label '{label}' is not 1, 0 or empty"
            raise _row_error(labels, number, reason, "bad_label")
        error = row.get("error", "")
        if error and (label != "0" or error not in ERRORS):
            reason = f"error '{error}' must be one of {', '.join(ERRORS)}, beside the label 0"
            raise _row_error(labels, number, reason, "bad_label")
        if label:
            given[pair] = int(label)
        if label == "0" and consensus[pair] == "positive":
            errors[error or "none given"] += 1
    ours = np.array([int(consensus[pair] == "positive") for pair in given], dtype=np.int64)
    theirs = np.array(list(given.values()), dtype=np.int64)
    right, positives = int((ours & theirs).sum()), int(ours.sum())
    low, high = proportion_confint(right, positives, method="wilson") if positives else (None, None)
    return {
        "pairs": len(consensus),
        "labelled": len(given),
        "agreement": float((ours == theirs).mean()) if len(given) else None,
        "cohen_kappa": kappa(ours, theirs),
        "confirmed": right / positives if positives else None,
        "confirmed_low": low,
        "confirmed_high": high,
        "errors": dict(errors.most_common()),
        "both_positive": right,
        "both_negative": int(((1 - ours) & (1 - theirs)).sum()),
        "consensus_positive_only": int((ours & (1 - theirs)).sum()),
        "expert_positive_only": int(((1 - ours) & theirs).sum()),
    }


def _spreadsheet(path: Path) -> Iterable[tuple[int, dict[str, str]]]:
    try:
        if path.suffix.lower() == ".xlsx":
            book = load_workbook(path, read_only=True, data_only=True)
            sheet = book[SHEET] if SHEET in book.sheetnames else book.worksheets[0]
            rows = [[_cell(value) for value in row] for row in sheet.iter_rows(values_only=True)]
        else:
            with path.open(encoding="utf-8-sig", newline="") as file:
                rows = [[_cell(value) for value in row] for row in csv.reader(file)]
    except OSError as error:
        raise unreadable(path, error) from error
    except UnicodeDecodeError as error:
        reason = "is not UTF-8: save it as 'CSV UTF-8' or as XLSX"
        raise DataError.at(path, reason, "not_utf8") from error
    except (BadZipFile, InvalidFileException, KeyError, csv.Error) as error:
        raise DataError.at(
            path, f"is not a CSV or XLSX file: {error}", "not_spreadsheet"
        ) from error
    header = rows[0] if rows else []
    if missing := {"pair", "label"} - set(header):
        raise _row_error(path, 1, f"the header has no column '{min(missing)}'", "missing_column")
    records = (dict(zip(header, row, strict=False)) for row in rows[1:])
    return enumerate(records, start=2)


def _row_error(path: Path, number: int, reason: str, code: str) -> DataError:
    return DataError(f"{path} row {number}: {reason}", code=code, path=path, row=number)


def _cell(value: object) -> str:
    """Returns a cell as text; spreadsheet programs store whole numbers as floats."""
    return "" if value is None else str(value).strip().removesuffix(".0")
