"""What all commands share: help, exit statuses, JSON, quick imports."""

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.core import TyperGroup

from care.cli.main import app, main
from tests.commands import parse
from tests.conftest import Builder, make_records
from tests.errors import error_code

# What makes a start slow, and is imported where a command needs it.
HEAVY = ("faiss", "numpy", "onnxruntime", "pyarrow", "pydantic", "torch", "transformers")


def commands(group: Any, *path: str) -> Iterator[tuple[str, ...]]:
    """Yields the names of all commands and groups."""
    for name, command in group.commands.items():
        yield (*path, name)
        if isinstance(command, TyperGroup):
            yield from commands(command, *path, name)


ALL = list(commands(typer.main.get_command(app)))


@pytest.mark.parametrize("command", ALL, ids=" ".join)
def test_each_command_has_help(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--help"]) == 0
    output = capsys.readouterr().out
    assert f"care {' '.join(command)}" in output
    assert main([*command, "-h"]) == 0
    assert capsys.readouterr().out == output


def test_the_first_commands_that_the_help_names_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    lines = (line.strip() for line in capsys.readouterr().out.splitlines())
    first = [parse(line)[0] for line in lines if line.startswith("care ")]
    assert first == ["demo", "index", "search"]


def test_the_version_is_that_of_the_distribution(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"care-retrieval {version('care-retrieval')}\n"


def test_the_commands_are_those_that_the_documents_name() -> None:
    named = {"index", "update", "versions", "search", "serve", "key", "evaluate", "doctor"}
    assert named <= {command[0] for command in ALL}


@pytest.mark.parametrize(
    "arguments",
    [["none"], ["index"], ["index", "c"], ["search", "q", "--index", "i", "--top-k", "x"]],
)
def test_wrong_usage_is_status_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CARE_INDEX", raising=False)
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert "Usage: care" in output.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["index", "c.jsonl", "--index", "test"],
        ["versions", "list", "--index", "test"],
        ["search", "q", "--index", "test"],
        ["key", "--name", "app"],
        ["bench", "service"],
        ["serve"],
    ],
)
def test_an_unknown_variable_is_refused_by_each_command(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CARE_INDEXS", "a secret")
    assert main(arguments) == 1
    output = capsys.readouterr()
    assert (output.out, output.err.count("\n")) == ("", 1)
    assert error_code(output.err) == "unknown_setting"
    assert "CARE_INDEXES" in output.err
    assert "a secret" not in output.err
    assert main([*arguments, "--help"]) == 0


def test_variables_of_kubernetes_are_ignored_by_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CARE_REDIS_SERVICE_HOST", "10.0.0.8")
    assert main(["key", "--name", "app"]) == 0


def test_an_unreadable_file_is_one_line_and_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test").write_text("a file where a folder should be")
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(json.dumps(make_records(1)[0]))
    arguments = ["index", str(corpus), "--index", "test", "--indexes", str(tmp_path)]
    assert main([*arguments, "--builds", str(tmp_path / "builds")]) == 1
    assert error_code(capsys.readouterr().err) == "input_output"


def test_results_are_one_json_object_on_standard_output(
    build_version: Builder, indexes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    version = build_version(make_records(3)).version
    capsys.readouterr()
    for command in ("list", "verify"):
        assert (
            main(["versions", command, "--index", "test", "--indexes", str(indexes), "--json"]) == 0
        )
        result = json.loads(capsys.readouterr().out)
        facts = result["versions"][0] if command == "list" else result
        assert (facts["version"], facts["documents"]) == (version, 3)
    assert main(["key", "--name", "app", "--json"]) == 0
    assert json.loads(capsys.readouterr().out).keys() == {"secret", "entry"}


@pytest.mark.parametrize("module", ["care", "care.cli.main"])
def test_nothing_heavy_is_imported_for_help(module: str) -> None:
    code = f"import {module}, sys; print(*sorted(set({HEAVY}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"


def test_all_names_of_the_python_api_exist() -> None:
    import care

    # Training needs an extra when it is called, not when it is looked up.
    for name in care.__all__:
        assert callable(getattr(care, name))
    assert dir(care) == sorted(care.__all__)
    with pytest.raises(AttributeError):
        care.none  # noqa: B018


def test_command_lines_of_documents_are_parsed_but_not_run() -> None:
    name, options = parse("care index corpus.jsonl --index mine --chunk-tokens 200")
    assert (name, options["corpus"], options["chunk_tokens"]) == ("index", "corpus.jsonl", 200)
    assert (
        parse(".venv/bin/python -m care versions prune --index a --keep 1")[0] == "versions prune"
    )
    with pytest.raises(KeyError):
        parse("care versions none")
    with pytest.raises(Exception, match="--none"):
        parse("care index c --index i --none")
