"""Indexes that commands create and delete."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from care.cli.main import main
from core.aliases import set_alias
from core.locks import exclusive
from core.terms import TermList
from core.versions import IndexFolder, list_indexes
from indexer.publication import BUILD_LOCK
from search.snapshot import load_index
from tests.conftest import Builder, make_records, write_jsonl
from tests.encoders import BigramEncoder

pytestmark = pytest.mark.usefixtures("test_encoders")

LIKE = ["--like", "test"]
WORDS = TermList({"拉肚子": ("腹泻",)})

# Runs `care indexes` and returns its JSON, or the code of its error.
Run = Callable[..., Any]


@pytest.fixture
def run(
    build_version: Builder, indexes: Path, pair_file: Path, capsys: pytest.CaptureFixture[str]
) -> Run:
    build_version(make_records(20), terms=WORDS)

    def run_with(command: str, *arguments: str) -> Any:
        pair = ["--pair", str(pair_file)] if command == "create" else []
        capsys.readouterr()
        status = main(["indexes", command, *pair, "--indexes", str(indexes), "--json", *arguments])
        output = capsys.readouterr()
        if status == 0:
            return json.loads(output.out)
        assert (status, output.out) == (1, "")
        (line,) = output.err.splitlines()
        return line.rpartition("[")[2].rstrip("]")

    return run_with


def test_an_index_is_created_filled_merged_and_deleted(
    run: Run, indexes: Path, pair_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = ["--filter-field", "department", "--filter-field", "year"]
    made = run("create", "new", *LIKE, *fields)
    folder = IndexFolder(indexes, "new")
    expected = {"index": "new", "version": folder.active(), "number": 1, "created": True}
    assert made == expected
    assert run("create", "new", *LIKE, *fields) == expected | {"created": False}
    manifest = load_index(folder, BigramEncoder()).manifest
    assert (manifest.count, manifest.filter_fields) == (0, {"department": 0, "year": 0})
    corpus = write_jsonl(tmp_path / "new.jsonl", [{"_id": "a", "text": "腹泻时多喝水"}])
    where = ["--index", "new", "--indexes", str(indexes), "--pair", str(pair_file)]
    builds = ["--builds", str(tmp_path / "builds")]
    assert main(["update", *where, *builds, "--add", str(corpus)]) == 0
    for _ in range(2):
        capsys.readouterr()
        assert main(["search", "拉肚子", *where, "--mode", "lexical", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert [hit["id"] for hit in found["hits"]] == ["a"]
        assert main(["merge", *where, *builds]) == 0
    assert run("delete", "new") == {"deleted": "new", "documents": 1}
    assert list_indexes(indexes) == ["test"]


def test_an_alias_says_what_an_index_is_like(run: Run, indexes: Path) -> None:
    set_alias(indexes, "live", "test")
    assert run("create", "new", "--like", "live")["created"]


def test_what_is_no_new_index_is_refused(
    run: Run, indexes: Path, monkeypatch: pytest.MonkeyPatch, build_version: Builder
) -> None:
    set_alias(indexes, "live", "test")
    build_version(make_records(20), name="foreign", space="another")
    build_version(make_records(20), name="plain", full_text=False)
    before = sorted(path.name for path in indexes.iterdir())
    for name in ("", "../x", "a b", "a" * 65, "病", "-a"):
        assert run("create", *LIKE, "--", name) == "bad_index_name"
        assert run("create", "new", "--like", name or ".x") == "bad_index_name"
    assert run("create", "live", *LIKE) == "index_is_alias"
    assert run("create", "plain", *LIKE) == "index_exists"
    assert run("create", "new", "--like", "none") == "no_active_version"
    assert run("create", "new", "--like", "foreign") == "embedding_space_mismatch"
    assert run("create", "new", *LIKE, "--filter-field", "a" * 5000) == "invalid_record"
    monkeypatch.setenv("CARE_MAX_INDEXES", "3")
    assert run("create", "new", *LIKE) == "quota_exceeded"
    assert sorted(path.name for path in indexes.iterdir() if path.name != ".lock") == before


def test_an_index_that_is_needed_or_not_there_is_not_deleted(run: Run, indexes: Path) -> None:
    run("create", "new", *LIKE)
    set_alias(indexes, "live", "new")
    assert run("delete", "new") == "index_has_alias"
    assert run("delete", "live") == "index_is_alias"
    assert run("delete", "none") == "no_active_version"
    assert run("delete", "../test") == "bad_index_name"
    assert list_indexes(indexes) == ["live", "new", "test"]


def test_a_build_keeps_an_index_from_others(run: Run, indexes: Path) -> None:
    with exclusive(indexes / "new", "build", BUILD_LOCK):
        assert run("create", "new", *LIKE) == "index_busy"
    run("create", "new", *LIKE)
    with exclusive(indexes / "new", "build", BUILD_LOCK):
        assert run("delete", "new") == "index_busy"
        assert run("create", "new", *LIKE) == "index_busy"
    assert run("delete", "new")["documents"] == 0
