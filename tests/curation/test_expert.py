import csv
from pathlib import Path

import pytest
from openpyxl import load_workbook

from care.cli.main import main
from core.errors import CareError, DataError
from core.records import read_jsonl
from curation.expert import ERRORS, expert_agreement, expert_sample
from tests.conftest import write_jsonl
from tests.errors import error_code, raises

COUNT = 40


@pytest.fixture
def benchmark(tmp_path: Path) -> Path:
    """An output folder of build-benchmark: a quarter positive, some disputed."""
    folder = tmp_path / "benchmark"
    folder.mkdir()
    queries = [{"_id": "q", "text": "=1+1 是什么病"}]
    write_jsonl(folder / "queries.jsonl", queries)
    documents = [{"_id": f"d{i}", "text": f"第{i}段"} for i in range(COUNT)]
    write_jsonl(folder / "corpus.jsonl", documents)
    verdicts = ["positive", "negative", "negative", "disputed"] * (COUNT // 4)
    write_jsonl(
        folder / "judgements.jsonl",
        [
            {"query-id": "q", "corpus-id": f"d{i}", "grades": {}, "verdict": verdict}
            for i, verdict in enumerate(verdicts)
        ],
    )
    (folder / "statistics.json").write_text("{}", encoding="utf-8")
    return folder


def key(folder: Path) -> dict[str, str]:
    return {str(row["pair"]): row["verdict"] for _, row in read_jsonl(folder / "key.jsonl")}


def test_the_sample_is_blind_and_the_same_each_time(benchmark: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert expert_sample(benchmark, out, 20, seed=1) == 20
    rows = list(csv.reader((out / "pairs.csv").open(encoding="utf-8-sig", newline="")))
    assert rows[0] == ["pair", "query", "passage", "label", "error", "comment"]
    assert len({row[2] for row in rows[1:]}) == 20
    assert all(row[3:] == ["", "", ""] for row in rows[1:])
    everything = (out / "pairs.csv").read_text("utf-8-sig")
    assert "positive" not in everything and "d1" not in everything
    assert set(key(out).values()) == {"positive", "negative"}
    first = (out / "key.jsonl").read_bytes(), (out / "pairs.csv").read_bytes()
    again, other = tmp_path / "again", tmp_path / "other"
    expert_sample(benchmark, again, 20, seed=1)
    assert ((again / "key.jsonl").read_bytes(), (again / "pairs.csv").read_bytes()) == first
    expert_sample(benchmark, other, 20, seed=2)
    assert (other / "key.jsonl").read_bytes() != first[0]


def test_an_existing_sample_is_not_overwritten(benchmark: Path, tmp_path: Path) -> None:
    expert_sample(benchmark, tmp_path, 5, seed=0)
    (tmp_path / "pairs.csv").write_text("labelled", encoding="utf-8")
    with raises(CareError, code="output_exists", path=tmp_path / "pairs.csv"):
        expert_sample(benchmark, tmp_path, 5, seed=0)
    assert (tmp_path / "pairs.csv").read_text(encoding="utf-8") == "labelled"


def test_no_text_becomes_a_formula(benchmark: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    expert_sample(benchmark, out, 5, seed=0)
    cell = load_workbook(out / "pairs.xlsx").active["B2"]
    assert (cell.value, cell.data_type) == ("=1+1 是什么病", "s")
    assert "'=1+1" in (out / "pairs.csv").read_text("utf-8-sig")


@pytest.mark.parametrize("kind", ["csv", "xlsx"])
def test_agreement_with_the_labels_of_a_spreadsheet(
    benchmark: Path, tmp_path: Path, kind: str
) -> None:
    out = tmp_path / "out"
    expert_sample(benchmark, out, 100, seed=0)
    truth = key(out)
    assert len(truth) == 30
    labels = {pair: str(int(verdict == "positive")) for pair, verdict in truth.items()}
    # The expert rejects two of ten positives, accepts one of twenty negatives, and skips one.
    positives = [pair for pair, verdict in truth.items() if verdict == "positive"]
    negatives = [pair for pair, verdict in truth.items() if verdict == "negative"]
    labels |= {positives[0]: "0", positives[1]: "0", negatives[0]: "1", negatives[1]: ""}
    path = out / f"pairs.{kind}"
    if kind == "csv":
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file))
        with path.open("w", encoding="utf-8-sig", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(row | {"label": labels[row["pair"]]} for row in reversed(rows))
    else:
        book = load_workbook(path)
        for row in book.active.iter_rows(min_row=2):
            label = labels[str(row[0].value)]
            row[3].value = float(label) if label else None
        book.save(path)
    result = expert_agreement(path, out / "key.jsonl")
    assert (result["pairs"], result["labelled"]) == (30, 29)
    assert result["agreement"] == pytest.approx(26 / 29)
    counts = [result[name] for name in ("both_positive", "both_negative")]
    assert counts == [8, 18]
    assert (result["consensus_positive_only"], result["expert_positive_only"]) == (2, 1)
    chance = (10 * 9 + 19 * 20) / 29**2
    assert result["cohen_kappa"] == pytest.approx((26 / 29 - chance) / (1 - chance))


@pytest.mark.parametrize(
    ("text", "code", "row"),
    [
        ("pair,query\n1,x\n", "missing_column", 1),
        ("pair,label\n1,2\n", "bad_label", 2),
        ("pair,label,error\n1,1,intent\n", "bad_label", 2),
        ("pair,label,error\n1,0,other\n", "bad_label", 2),
        ("pair,label\n1,1\n1,0\n", "duplicate_id", 3),
        ("pair,label\n99,1\n", "unknown_pair", 2),
    ],
)
def test_a_wrong_spreadsheet(
    benchmark: Path, tmp_path: Path, text: str, code: str, row: int
) -> None:
    out = tmp_path / "out"
    expert_sample(benchmark, out, 5, seed=0)
    path = tmp_path / "back.csv"
    path.write_text(text, encoding="utf-8")
    with raises(DataError, code=code, path=path, row=row):
        expert_agreement(path, out / "key.jsonl")


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("back.xlsx", b"no", "not_spreadsheet"),
        ("back.csv", "pair,label\n1,是\n".encode("gb18030"), "not_utf8"),
        ("back.csv", None, "unreadable"),
    ],
)
def test_a_file_that_is_not_a_spreadsheet(
    tmp_path: Path, name: str, content: bytes | None, code: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    write_jsonl(tmp_path / "key.jsonl", [])
    with raises(DataError, code=code, path=path):
        expert_agreement(path, tmp_path / "key.jsonl")


def test_an_incomplete_benchmark_is_an_error(benchmark: Path, tmp_path: Path) -> None:
    (benchmark / "statistics.json").unlink()
    with raises(CareError, code="incomplete_benchmark", path=benchmark):
        expert_sample(benchmark, tmp_path / "out", 5, seed=0)
    assert not (tmp_path / "out").exists()


def test_a_key_that_is_another_file(benchmark: Path, tmp_path: Path) -> None:
    path = tmp_path / "back.csv"
    path.write_text("pair,label\n1,1\n", encoding="utf-8")
    with raises(DataError, code="not_key", path=benchmark / "judgements.jsonl", line=1):
        expert_agreement(path, benchmark / "judgements.jsonl")


def test_a_spreadsheet_with_another_sheet_and_missing_rows(benchmark: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    expert_sample(benchmark, out, 100, seed=0)
    labels = {pair: int(verdict == "positive") for pair, verdict in key(out).items()}
    book = load_workbook(out / "pairs.xlsx")
    for row in book.active.iter_rows(min_row=2):
        row[3].value = labels[str(row[0].value)]
    book.active.delete_rows(5, 10)
    book.create_sheet("notes", 0)["A1"] = "seen on Monday"
    book.active = 0
    book.save(out / "pairs.xlsx")
    result = expert_agreement(out / "pairs.xlsx", out / "key.jsonl")
    assert (result["pairs"], result["labelled"], result["agreement"]) == (30, 20, 1.0)


def test_numbers_with_a_point_are_labels_in_csv_too(benchmark: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    expert_sample(benchmark, out, 100, seed=0)
    truth = key(out)
    rows = "".join(f"{pair}.0,{int(truth[pair] == 'positive')}.0,\r\n" for pair in reversed(truth))
    path = tmp_path / "back.csv"
    path.write_bytes(("\ufeffpair,label,comment\r\n" + rows + ",,\r\n").encode())
    result = expert_agreement(path, out / "key.jsonl")
    assert (result["labelled"], result["agreement"], result["cohen_kappa"]) == (30, 1.0, 1.0)


def test_a_result_that_cannot_be_written(
    benchmark: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    expert_sample(benchmark, out, 5, seed=0)
    words = ["curate", "expert-agreement", out / "pairs.csv", "--key", out / "key.jsonl"]
    words += ["--output", tmp_path / "none" / "result.json"]
    assert main(list(map(str, words))) == 1
    error = capsys.readouterr().err
    assert error_code(error) == "input_output" and str(tmp_path / "none") in error


def test_an_expert_checks_the_false_negatives_of_an_audit(tmp_path: Path) -> None:
    audit, out = tmp_path / "audit", tmp_path / "out"
    audit.mkdir()
    rows = [
        {"query-id": "q", "query": "高血压怎么办", "corpus-id": f"d{i}", "text": f"第{i}段"}
        for i in range(50)
    ]
    write_jsonl(audit / "false-negatives.jsonl", rows)
    with raises(CareError, code="incomplete_benchmark", path=audit):
        expert_sample(audit, out, 25, seed=0)
    (audit / "statistics.json").write_text("{}", encoding="utf-8")
    assert expert_sample(audit, out, 25, seed=0) == 25
    # The expert confirms 23 of 25.
    labels = {0: "0,intent", 1: "0,"}
    lines = [f"{pair},{labels.get(at, '1,')}" for at, pair in enumerate(key(out))]
    path = tmp_path / "back.csv"
    path.write_text("\n".join(["pair,label,error", *lines]), encoding="utf-8")
    result = expert_agreement(path, out / "key.jsonl")
    assert result["confirmed"] == 0.92
    # Wilson's interval (Newcombe 1998).
    bounds = result["confirmed_low"], result["confirmed_high"]
    assert bounds == pytest.approx((0.7503, 0.9778), abs=1e-4)
    assert result["errors"] == {"intent": 1, "none given": 1}
    book = load_workbook(out / "pairs.xlsx")
    assert [row[0] for row in book["errors"].iter_rows(values_only=True)] == ["error", *ERRORS]
