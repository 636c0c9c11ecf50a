"""What commands write to terminals: in each encoding, without characters that act on them."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from care.cli.main import main
from tests.conftest import Builder, make_records, write_jsonl
from tests.core.test_terminal import ACTIVE

pytestmark = pytest.mark.usefixtures("test_encoders")

# What a document, a file or a query may hold.
HOSTILE = "".join(
    character for character in ACTIVE if character not in "\x00" and character < "\ud800"
)
Run = Callable[..., tuple[int, str, str]]


def hostile(text: str) -> str:
    return f"{text}{HOSTILE}\x1b[2J{text}😀é"


def read(stream: io.TextIOWrapper) -> str:
    stream.flush()
    stream.seek(0)
    return stream.read()


@pytest.fixture(params=["utf-8", "utf-16", "gbk", "ascii", "latin-1"])
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command with standard streams of an encoding; returns status, output and errors."""

    def run_with(*arguments: str) -> tuple[int, str, str]:
        streams = [io.TextIOWrapper(io.BytesIO(), request.param, newline="") for _ in range(2)]
        with monkeypatch.context() as patched:
            for name, stream in zip(("stdout", "stderr"), streams, strict=True):
                patched.setattr(sys, name, stream)
            status = main(arguments)
        output, errors = map(read, streams)
        assert not set(output + errors) & (set(ACTIVE) - {"\n"}), "a character acts on terminals"
        return status, output, errors

    return run_with


def test_documents(run: Run, build_version: Builder, indexes: Path, pair_file: Path) -> None:
    records = make_records(3)
    for record in records:
        record["_id"] = f"{record['_id']}😀"
        record["title"], record["text"] = hostile(record["title"]), hostile(record["text"])
        record["metadata"] = {hostile("field"): hostile("value"), "list": [hostile("value")]}
    build_version(records)
    named = ["--index", "test", "--indexes", str(indexes), "--pair", str(pair_file)]
    search = ["search", hostile("血压"), *named, "--evidence", "--explain"]
    status, output, _ = run(*search)
    assert (status, "\\x1b[2J" in output, output.count("[d000")) == (0, True, 3)
    status, output, _ = run(*search, "--json")
    hits = {hit["id"]: hit for hit in json.loads(output)["hits"]}
    assert (status, output.count("\n")) == (0, 1)
    for record in records:
        hit = hits[record["_id"]]
        assert {name: hit[name] for name in ("title", "text", "metadata")} == {
            name: record[name] for name in ("title", "text", "metadata")
        }


def test_index_and_names_of_files(run: Run, tmp_path: Path, pair_file: Path) -> None:
    folder = tmp_path / HOSTILE.replace("/", "")
    folder.mkdir()
    records = [*make_records(40), {"_id": hostile("1"), "text": hostile("")}, {"_id": "😀"}]
    corpus = str(write_jsonl(folder / "c.jsonl", records))
    folders = ["--indexes", str(folder), "--builds", str(folder / "builds")]
    named = ["--index", "test", *folders, "--pair", str(pair_file)]
    assert run("index", corpus, *named, "--max-reject-rate", "0")[0] == 1
    status, output, _ = run("index", corpus, *named, "--max-reject-rate", "1")
    assert (status, output.count("\n")) == (0, 6)
    assert "active  " in output
    assert run("versions", "list", *folders[:2])[0] == 0
    status, output, _ = run("versions", "list", *folders[:2], "--json")
    assert (status, len(json.loads(output)["versions"])) == (0, 1)


@pytest.mark.parametrize(
    "arguments",
    [
        ["index", f"none{HOSTILE}.jsonl", "--index", "test"],
        ["search", "头痛", "--index", hostile("none")],
        ["search", "头痛", "--index", "none", "--filter", hostile("")],
        ["search", "头痛", "--index", "none", f"--{HOSTILE}"],
        [hostile("none")],
        ["--help"],
        ["search", "--help"],
        ["key", "--name", hostile("app")],
        ["train", hostile("none.yaml")],
        ["curate", "mix", hostile("none.yaml")],
    ],
)
def test_messages(
    run: Run, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status, output, errors = run(*arguments)
    assert status in (0, 1, 2)
    assert (output if status == 0 else errors).strip()


@pytest.mark.parametrize("file", ["queries", "qrels"])
def test_judgements(
    run: Run, file: str, build_version: Builder, tmp_path: Path, pair_file: Path
) -> None:
    build_version(make_records(3))
    queries = write_jsonl(tmp_path / "queries.jsonl", [{"_id": "q\u202e", "text": ""}])
    qrels = tmp_path / "qrels.tsv"
    id_ = "q\u202e" if file == "queries" else "\x1b[2J"
    qrels.write_text(f"query-id\tcorpus-id\tscore\n{id_}\td0000\t1\n", encoding="utf-8")
    named = ["--index", "test", "--indexes", str(tmp_path / "indexes"), "--pair", str(pair_file)]
    status, _, errors = run("evaluate", *named, "--queries", str(queries), "--qrels", str(qrels))
    assert (status, errors.count("\n")) == (1, 1)
