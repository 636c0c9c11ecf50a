import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from care.cli.main import main
from tests.conftest import Builder, make_records
from tests.errors import error_code

pytestmark = pytest.mark.usefixtures("test_encoders")

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(
    build_version: Builder, indexes: Path, pair_file: Path, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Searches an index of 30 documents; returns status, output and errors."""
    build_version(make_records(30))

    def search(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        named = ["--index", "test", "--indexes", str(indexes), "--pair", str(pair_file)]
        status = main(["search", *named, *arguments])
        output = capsys.readouterr()
        return status, output.out, output.err

    return search


def test_hits_are_printed_with_score_title_text_and_metadata(run: Run) -> None:
    status, output, _ = run("高血压第0讲", "--top-k", "2", "--filter", "department=心血管科")
    lines = output.splitlines()
    assert status == 0
    assert lines[0].startswith("  1. 0.")
    assert lines[0].endswith("  高血压第0讲")
    assert lines[1].strip().startswith("高血压患者第0号的护理要点")
    assert lines[2].strip().startswith("[d0000] department: 心血管科")
    assert lines[-1].startswith("2 hits in ")


def test_values_of_one_field_are_alternatives_and_fields_must_all_match(run: Run) -> None:
    both = ["--filter", "department=儿科", "--filter", "department=骨科", "--top-k", "30"]
    assert run("骨折", *both)[1].count("department: ") == 20
    assert run("骨折", *both, "--filter", "tags=组1")[1].count("department: ") == 4
    # A boolean of the index, not the text.
    assert run("骨折", "--filter", "rare=true")[1].count("[d0015]") == 1


def test_values_are_excluded_and_numbers_bounded(build_version: Builder, run: Run) -> None:
    records = make_records(30)
    for year, record in enumerate(records, 2000):
        record["metadata"] |= {"year": year, "grade": year / 10}
    build_version(records)
    everything = ["骨折", "--top-k", "30"]
    without = run(*everything, "--filter", "department!=儿科", "--filter", "department!=骨科")[1]
    assert without.count("department: 心血管科") == without.count("department: ") == 10
    between = run(*everything, "--filter", "year>=2003", "--filter", "year<2006.5")[1]
    assert between.count("department: ") == 4
    years = ["year>=2009", "year>=2003", "year>=2005", "year<2009.5", "year<2020"]
    tightest = run(*everything, *(part for year in years for part in ("--filter", year)))[1]
    assert tightest.count("department: ") == 1
    assert run(*everything, "--filter", "grade=200.4")[1].count("[d0004]") == 1
    assert run(*everything, "--filter", "grade>202", "--filter", "year<=2021")[1].count("[d") == 1


@pytest.mark.parametrize(
    ("arguments", "code", "field"),
    [
        (["--filter", "unknown=a"], "unknown_filter_field", "filter.unknown"),
        (["--top-k", "0"], "greater_than_equal", "top_k"),
        (["--min-score", "101"], "less_than_equal", "min_score"),
        (["--limit-per", "unknown=1"], "unknown_filter_field", "limit_per.field"),
        (["--limit-per", "department=0"], "greater_than_equal", "limit_per.hits"),
    ],
)
def test_errors_have_the_codes_of_the_service_and_name_the_field(
    run: Run, arguments: list[str], code: str, field: str
) -> None:
    status, output, errors = run("骨折", *arguments)
    assert (status, output) == (1, "")
    assert error_code(errors) == code
    assert errors.startswith(f"error: {field}: ")


@pytest.mark.parametrize(
    "filters",
    [["department"], ["=儿科"], ["year>late"], ["year<true"], ["year>NaN"], ["year=1", "year>1"]],
)
def test_a_filter_that_cannot_be_read_is_wrong_usage(run: Run, filters: list[str]) -> None:
    assert run("骨折", *(part for one in filters for part in ("--filter", one)))[0] == 2


@pytest.mark.parametrize("limit", ["department", "=2", "department=two", "department=1.5"])
def test_a_limit_that_cannot_be_read_is_wrong_usage(run: Run, limit: str) -> None:
    assert run("骨折", "--limit-per", limit)[0] == 2


def test_hits_show_their_evidence(build_version: Builder, run: Run) -> None:
    build_version([{"_id": f"d{i}", "text": f"第{i}篇的开头。骨折要固定。"} for i in range(12)])
    assert run("骨折怎么办", "--top-k", "1")[1].splitlines()[1].strip().startswith("第")
    shown = run("骨折怎么办", "--top-k", "1", "--evidence")[1].splitlines()
    assert shown[1].strip() == "骨折要固定。"


def test_the_only_index_needs_no_name(
    build_version: Builder, indexes: Path, pair_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["search", "骨折", "--indexes", str(indexes), "--pair", str(pair_file)]
    assert main(command) == 2
    assert "--index" in capsys.readouterr().err
    build_version(make_records(30))
    (indexes / "unfinished").mkdir()
    assert main(command) == 0
    assert "10 hits in " in capsys.readouterr().out
    shutil.copytree(indexes / "test", indexes / "second")
    assert main(command) == 2
    assert "second, test" in capsys.readouterr().err
