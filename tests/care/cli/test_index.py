import gzip
import io
import json
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from care.cli.main import main
from core import progress
from core.versions import IndexFolder, read_manifest
from indexer.publication import IndexWriter
from tests.conftest import make_records, write_jsonl
from tests.encoders import BigramEncoder
from tests.indexer.builds import edit_manifest, only_folder, room_for, state, to_schema_2

pytestmark = pytest.mark.usefixtures("test_encoders")

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(indexes: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command on index 'test' and returns its status, output and errors."""

    def main_with(command: str, *arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        named = ["--index", "test", "--indexes", str(indexes)]
        status = main([*command.split(), *named, *arguments])
        output = capsys.readouterr()
        return status, output.out, output.err

    return main_with


@pytest.fixture
def build(run: Run, tmp_path: Path, pair_file: Path) -> Run:
    """Builds index 'test' from records, with the test encoder."""

    def build_with(
        records: list[dict[str, Any]], *arguments: str, corpus: str | None = None
    ) -> tuple[int, str, str]:
        written = write_jsonl(tmp_path / "corpus.jsonl", records)
        folders = ["--builds", str(tmp_path / "builds"), "--pair", str(pair_file)]
        return run("index", str(written) if corpus is None else corpus, *folders, *arguments)

    return build_with


@pytest.fixture
def update(run: Run, tmp_path: Path, pair_file: Path) -> Run:
    """Updates index 'test', with the test encoder."""
    return partial(run, "update", "--builds", str(tmp_path / "builds"), "--pair", str(pair_file))


def error_line(errors: str) -> str:
    """The one line that a failed command ends with; a log has no progress bars."""
    assert "\r" not in errors
    lines = [line for line in errors.splitlines() if line.startswith("error: ")]
    (line,) = lines
    assert errors.endswith(f"{line}\n")
    return line


def test_build_says_what_it_did_and_what_is_active(build: Run, indexes: Path) -> None:
    records = make_records(30)
    status, output, errors = build([*records, records[3] | {"_id": "copy"}])
    assert (status, errors) == (0, "")
    version = IndexFolder(indexes, "test").active()
    lines = output.splitlines()
    assert lines[0].startswith("corpus  31 documents, 30 different texts, ")
    assert lines[1].startswith("encode  30 texts in ")
    assert lines[2].startswith("index   Flat, 31 × 64, ")
    assert "recall@10 1.0000 on 30 queries" in lines[2]
    share = re.search(r"encoder busy (\d+\.\d)% of the time\n", output)
    assert share and 0 < float(share[1]) <= 100
    assert lines[-1] == f"active  {indexes / 'test' / version}"


def test_a_second_build_uses_the_vectors_of_the_first(build: Run, indexes: Path) -> None:
    build(make_records(30))
    status, output, _ = build(make_records(30))
    assert status == 0
    assert "30 vectors" in output
    assert "\nencode" not in output
    assert len(IndexFolder(indexes, "test").versions()) == 2


def test_reuse_keeps_a_version_that_is_up_to_date(build: Run, indexes: Path) -> None:
    build(make_records(10))
    status, output, _ = build(make_records(10), "--reuse")
    assert (status, output.count("it is up to date")) == (0, 1)
    assert "it is up to date" not in build(make_records(11), "--reuse")[1]
    assert len(IndexFolder(indexes, "test").versions()) == 2


def test_encode_stops_at_the_shards(build: Run, indexes: Path, tmp_path: Path) -> None:
    status, output, _ = build(make_records(10), "--shard-size", "4", "--encode-only")
    folder = only_folder(tmp_path / "builds" / "test")
    assert status == 0
    assert output.endswith(f"shards  {folder}\n")
    assert len(list(folder.glob("shard-*.npy"))) == 3
    assert not indexes.exists()


def test_chunks_are_counted_and_listed(build: Run, run: Run) -> None:
    records = [*make_records(3), {"_id": "long", "text": "很长的一段话。" * 50}]
    status, output, _ = build(records, "--chunk-tokens", "70", "--chunk-overlap", "10")
    assert status == 0
    corpus = "corpus  4 documents in 9 chunks, 5 different texts (1 nearly equal), "
    assert output.startswith(corpus)
    assert "0 truncated at the encoder's length" in output
    assert "--chunk-tokens" not in output
    assert "  9 chunks  Flat" in run("versions list")[1]


def test_texts_that_are_cut_short_suggest_chunks(build: Run) -> None:
    output = build([*make_records(3), {"_id": "long", "text": "很长的一段话。" * 50}])[1]
    assert "1 truncated at the encoder's length\n" in output
    assert "--chunk-tokens 200 splits long documents into chunks\n" in output
    assert "--chunk-tokens" not in build(make_records(3))[1]


def test_rejects_are_counted_and_their_list_is_named(build: Run, tmp_path: Path) -> None:
    status, output, _ = build([*make_records(9), {"_id": "bad"}], "--max-reject-rate", "0.1")
    assert status == 0
    assert "1 rejected" in output
    rejects = only_folder(tmp_path / "builds" / "test") / "rejects.jsonl"
    assert f"rejects are listed in {rejects}" in output
    assert json.loads(rejects.read_text("utf-8"))["line"] == 10


def test_a_folder_with_compressed_files_is_indexed_and_other_files_are_named_once(
    build: Run, update: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "notes.xyz").touch()
    plain = write_jsonl(folder / "a.jsonl", make_records(20))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(b'{"_id": "b", "text": "x"}'))
    for arguments in (("--dry-run",), ("--reuse",)):
        caplog.clear()
        status, output, _ = build([], *arguments, corpus=str(folder))
        assert (status, "21 documents" in output) == (0, True)
        assert [message.endswith(": notes.xyz") for message in caplog.messages] == [True]
    plain.unlink()
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(b'{"_id": "c", "text": "y"}'))
    status, output, _ = update("--add", str(folder))
    assert status == 0 and "1 documents added" in output and "index   Flat, 22 ×" in output


def test_documents_from_standard_input_are_added(
    build: Run, update: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = make_records(7)
    build(records[:5])
    lines = "".join(f"{json.dumps(one)}\n" for one in records).encode()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines)))
    status, output, _ = update("--add", "-")
    assert status == 0
    assert output.startswith("update  2 documents added, 0 replaced, 0 deleted, 5 unchanged;")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"")))
    status, _, errors = update("--add", "-")
    assert status == 1 and errors.endswith("[empty_corpus]\n")


@pytest.mark.parametrize("option", [["--add", "a.jsonl"], ["--encode-all"], ["--factory", "Flat"]])
def test_an_index_that_follows_a_folder_takes_no_other_changes(
    build: Run, run: Run, tmp_path: Path, option: list[str]
) -> None:
    build(make_records(5))
    status, _, errors = run("update", "--watch", str(tmp_path), *option)
    assert status == 1 and errors.startswith(f"error: {option[0]} excludes --watch")


def test_the_weight_of_full_text_is_changed_alone(build: Run, update: Run, indexes: Path) -> None:
    build(make_records(10))
    before = IndexFolder(indexes, "test").active()
    assert update("--lexical-weight=-1")[0] == 2
    status, output, _ = update("--lexical-weight", "0.5")
    version = IndexFolder(indexes, "test").active()
    assert status == 0 and version != before
    assert output.startswith(f"active  {indexes / 'test' / version}: ")
    facts = json.loads(update("--lexical-weight", "0.5", "--json")[1])
    assert (facts["version"], facts["built"]) == (version, False)


def test_versions_can_be_listed_switched_verified_and_pruned(
    build: Run, run: Run, tmp_path: Path
) -> None:
    for count in (10, 11, 12):
        build(make_records(count))
    listed = run("versions list")[1].splitlines()
    assert listed[0] == "test"
    assert [line[2] for line in listed[1:]] == [" ", " ", "*"]
    ids = [line[4:].split()[0] for line in listed[1:]]
    assert "11 documents  Flat  bigrams-1" in listed[2]

    for arguments, active in (("rollback", ids[1]), (f"activate --version {ids[0]}", ids[0])):
        status, output, _ = run(f"versions {arguments}")
        assert (status, output.split(":")[0]) == (0, f"active  {active}")
    assert run("versions verify")[1].endswith(f" {ids[0]}\n")
    assert run("versions verify", "--version", ids[2])[1].endswith(f" {ids[2]}\n")
    builds = tmp_path / "builds"
    pruned = run("versions prune", "--keep", "1", "--builds", str(builds))
    assert pruned == (0, f"deleted {ids[1]}\n", "")
    assert len(list((builds / "test").iterdir())) == 2
    assert [line[2:5] for line in run("versions list")[1].splitlines()[1:]] == [
        f"* {ids[0][0]}",
        f"  {ids[2][0]}",
    ]


def test_all_indexes_are_listed_without_a_name(
    build: Run, indexes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["versions", "list", "--indexes", str(indexes)]) == 0
    assert capsys.readouterr().out == f"no index in {indexes}\n"
    build(make_records(5))
    assert main(["versions", "list", "--indexes", str(indexes)]) == 0
    assert capsys.readouterr().out.startswith("test\n  * ")


def test_an_index_is_listed_during_its_first_build(
    run: Run, indexes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with IndexWriter(indexes, "test").building("build"):
        assert main(["versions", "list", "--indexes", str(indexes)]) == 0
        output = capsys.readouterr().out
        assert output.startswith(f"test\n  locked: build, process {os.getpid()} ")
        assert run("versions list") == (0, output, "")
    status, _, errors = run("versions list")
    assert (status, error_line(errors).split()[-1]) == (1, "[no_active_version]")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--pair", "none"], "unknown_pair"),
        (["--pair", "none.toml"], "unknown_pair"),
        (["--factory", "IVF64,PQ8"], "unsupported_factory"),
        (["--queries", "none.jsonl"], "corpus_missing"),
        (["--chunk-tokens", "201"], "chunks_too_long"),
        (["--chunk-tokens", "9", "--chunk-overlap", "9"], "overlap_too_long"),
        (["--chunk-overlap", "9"], "option_not_taken"),
        (["--tokens-per-second", "9"], "option_not_taken"),
        (["--base-url", "http://h"], "option_not_taken"),
        (["--replicas", "8"], "option_not_taken"),
        (["--dtype", "float16"], "option_not_taken"),
        (["--dtype", "float16", "--backend", "openvino"], "option_not_taken"),
        (["--ray-actors", "2"], "option_not_taken"),
        (["--index", "../a"], "bad_index_name"),
    ],
)
def test_what_cannot_be_built_is_one_line_and_status_1(
    build: Run, indexes: Path, arguments: list[str], code: str
) -> None:
    status, output, errors = build(make_records(3), *arguments)
    assert (status, output) == (1, "")
    assert error_line(errors).endswith(f" [{code}]")
    assert IndexFolder(indexes, "test").versions() == []


@pytest.mark.parametrize(("corpus", "code"), [("none.jsonl", "corpus_missing"), ("", "no_corpus")])
def test_a_missing_corpus_is_one_line_and_status_1(build: Run, corpus: str, code: str) -> None:
    status, output, errors = build([], corpus=corpus)
    assert (status, output) == (1, "")
    assert error_line(errors).endswith(f" [{code}]")


def test_a_bad_corpus_is_said_in_one_line_that_names_file_and_line(
    build: Run, tmp_path: Path
) -> None:
    status, _, errors = build([*make_records(3), {"_id": "bad", "text": " "}])
    assert status == 1
    assert f"{tmp_path / 'corpus.jsonl'} line 4" in error_line(errors)
    assert error_line(errors).endswith(" [too_many_rejects]")


# For 300 documents: text takes about 62 kB, vectors 77 kB, shards as much as they are asked for.
@pytest.mark.parametrize(
    ("room", "shard_size", "last_bar"),
    [
        (30_000, 16, "read"),
        (70_000, 300, "encode"),
        (70_000, 16, "index"),
    ],
)
def test_a_full_disk_is_said_in_one_line_and_changes_nothing(
    build: Run,
    run: Run,
    indexes: Path,
    tmp_path: Path,
    room: int,
    shard_size: int,
    last_bar: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    build(make_records(20))
    monkeypatch.setattr(progress, "_LOG_INTERVAL", 0.0)
    before = state(indexes)
    corpus = str(write_jsonl(tmp_path / "large.jsonl", make_records(300)))
    arguments = ["--shard-size", str(shard_size)]
    with room_for(room):
        status, output, errors = build(make_records(1), *arguments, corpus=corpus)
    assert (status, output) == (1, "")
    assert error_line(errors).startswith(f"error: {tmp_path}/")
    assert re.findall(r"^(\w+) *:(?= .*docs)", errors, re.MULTILINE)[-1] == last_bar
    assert state(indexes) == before
    assert run("versions verify")[0] == 0
    assert build(make_records(1), *arguments, corpus=corpus)[0] == 0
    assert run("versions verify")[0] == 0


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["versions list"], "no_active_version"),
        (["versions verify"], "no_active_version"),
        (["versions verify", "--version", "x"], "manifest_missing"),
        (["versions activate", "--version", "x"], "unknown_version"),
        (["versions rollback"], "no_active_version"),
        (["versions prune"], "no_active_version"),
    ],
)
def test_without_a_version_each_command_says_so(run: Run, command: list[str], code: str) -> None:
    status, output, errors = run(*command)
    assert (status, output) == (1, "")
    assert error_line(errors).endswith(f" [{code}]")


def test_an_interrupted_build_says_how_to_go_on(
    build: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(BigramEncoder, "encode", interrupt)
        status, _, errors = build(make_records(3))
    assert status == 130
    assert "interrupted" in errors
    assert build(make_records(3))[0] == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["--recall", "1.5"],
        ["--max-reject-rate", "-1"],
        ["--recall", "high"],
        ["--chunk-tokens", "0"],
        ["--shard-size", "0"],
        ["--batch-size", "x"],
        ["--threads", "-2"],
    ],
)
def test_a_number_out_of_range_is_a_usage_error(build: Run, arguments: list[str]) -> None:
    status, output, errors = build(make_records(1), *arguments)
    assert (status, output) == (2, "")
    assert arguments[0] in errors


def test_a_version_of_the_earlier_schema_is_migrated(
    build: Run, run: Run, indexes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for count in (10, 11):
        build(make_records(count))
    versions = IndexFolder(indexes, "test").versions()
    before = read_manifest(indexes / "test" / versions[1])
    for version in versions:
        edit_manifest(indexes / "test" / version, to_schema_2)
    assert run("versions verify")[0] == 0
    status, output, _ = run("versions migrate")
    assert (status, [line.split()[-1] for line in output.splitlines()]) == (0, versions)
    assert read_manifest(indexes / "test" / versions[1]) == before
    assert run("versions migrate")[0] == 0
    assert run("versions verify")[0] == 0


def test_a_term_list_with_a_fault_changes_nothing(
    build: Run, update: Run, indexes: Path, tmp_path: Path
) -> None:
    build(make_records(10))
    before = IndexFolder(indexes, "test").versions()
    terms = tmp_path / "terms.tsv"
    terms.write_text("拉肚子\t腹泻\n心梗 心肌梗死\n", encoding="utf-8")
    status, _, error = update("--terms", str(terms))
    assert status == 1
    assert f"{terms} line 2" in error
    assert "[bad_term_list]" in error
    assert IndexFolder(indexes, "test").versions() == before
    terms.write_text("拉肚子\t腹泻\n", encoding="utf-8")
    status, _, error = update("--terms", str(terms), "--no-full-text")
    assert "[option_not_taken]" in error
    assert update("--terms", str(terms))[0] == 0
    assert len(IndexFolder(indexes, "test").versions()) == 2


def test_a_table_is_shown_before_it_is_read(
    build: Run, update: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "faq.csv"
    path.write_text("编号,标题,内容\n1,高血压,少吃盐\n2,失眠,早起\n", encoding="gbk")
    status, output, errors = build([], "--dry-run", corpus=str(path))
    assert (status, errors) == (0, "")
    lines = output.splitlines()
    assert lines[0].startswith("read    faq.csv (CSV, GB18030): id 编号, title 标题, text 内容")
    assert lines[1] == "passage 1  高血压"
    estimate = json.loads(build([], "--dry-run", "--json", corpus=str(path))[1])["estimate"]
    assert [passage["id"] for passage in estimate["passages"]] == ["1", "2"]

    status, output, _ = build([], corpus=str(path))
    assert status == 0
    assert output.startswith("corpus  2 documents, 2 different texts, ")
    (said,) = caplog.messages
    assert said.startswith("faq.csv (CSV, GB18030): id 编号, title 标题, text 内容, ")
    path.write_text("编号,内容\n3,发热\n", encoding="utf-8")
    fields = ["--text-field", "内容", "--id-field", "编号"]
    status, output, _ = update("--add", str(path), *fields)
    assert status == 0, output
    assert "1 documents added" in output


def test_a_folder_of_files_is_one_corpus(
    build: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", make_records(5))
    (folder / "b.md").write_text("# 感冒\n\n多喝水。\n\n## 用药\n\n遵医嘱。\n", encoding="utf-8")
    (folder / "c.csv").write_text("text\n甲\n甲\n", encoding="utf-8")
    for name in ("d.xls", "empty.txt", "damaged.docx"):
        (folder / name).touch()
    (folder / "damaged.docx").write_bytes(b"x")
    estimate = json.loads(build([], "--dry-run", "--json", corpus=str(folder))[1])["estimate"]
    assert (estimate["rejected"], estimate["documents"]) == (1, 9)
    assert estimate["first_reject"].startswith(str(folder / "damaged.docx"))
    (folder / "damaged.docx").unlink()
    caplog.clear()
    status, output, _ = build([], corpus=str(folder))
    assert status == 0
    assert output.startswith("corpus  9 documents, 8 different texts, ")
    (unread,) = caplog.messages
    assert unread.endswith(": d.xls")
    assert build([], "--reuse", corpus=str(folder))[1].count("it is up to date") == 1


def test_a_file_that_cannot_be_read_is_one_clear_error(build: Run, tmp_path: Path) -> None:
    path = tmp_path / "faq.csv"
    path.write_text("a,b\n1,2\n")
    for extra in ([], ["--dry-run"], ["--text-field", "c"]):
        status, _, errors = build([], *extra, corpus=str(path))
        assert status == 1
        assert str(path) in error_line(errors)
