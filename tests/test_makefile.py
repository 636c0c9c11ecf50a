"""Targets of the Makefile: each expands to commands of `care` that parse."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.commands import parse

ROOT = Path(__file__).parents[1]
# Commands that write the texts of the recipes of care-mini.
CARE_MINI_TEXTS = [*["phrases"] * 3, "splits", *["curate reword"] * 5]


def make(*words: str, **environment: str) -> str:
    """Returns what make prints for targets and variables, in a shell without settings."""
    inherited = {name: text for name, text in os.environ.items() if not name.startswith("CARE_")}
    command = ["make", "--no-print-directory", *words]
    run = subprocess.run(
        command, cwd=ROOT, env=inherited | environment, capture_output=True, text=True, check=True
    )
    return run.stdout


def commands(*words: str, **environment: str) -> list[tuple[str, dict[str, Any]]]:
    """Returns the commands of `care` that make would run."""
    lines = make("--dry-run", "CARE=/bin/care", *words, **environment).replace("\\\n", " ")
    return [parse(line) for line in lines.splitlines() if line.startswith("/bin/care ")]


def test_without_a_target_the_targets_are_listed() -> None:
    listed = make()
    for target in ("demo", "test", "build-index", "evaluate"):
        assert f"make {target} " in listed


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["build-index"], ["index"]),
        (["update", "ADD=a.jsonl", "DELETE=ids.txt"], ["update"]),
        (["serve"], ["serve"]),
        (["evaluate"], ["evaluate"]),
        (["cmedteb", "HUB=owner/name"], ["cmedteb run", "cmedteb report"]),
        (["tradeoff"], ["cmedteb tradeoff"]),
        (["quality"], ["splits", "cmedteb splits", "bench encoders", "bench encoders"]),
        (["export"], ["export"]),
        (["train", "RECIPE=recipe.yaml"], ["train"]),
        (["ablations"], ["ablations"]),
        (["care-mini"], [*CARE_MINI_TEXTS, "train", "train", "export"]),
        (["care-mini-query"], [*CARE_MINI_TEXTS, "train", "export"]),
        (["care-mini-lookup"], [*CARE_MINI_TEXTS, "train", "export"]),
        (["bench", "ONLY=modes"], ["index", "bench service"]),
        (["bench-peers", "ONLY=bare-loop"], ["index", "bench peers"]),
    ],
)
def test_a_target_runs_commands_that_parse(words: list[str], expected: list[str]) -> None:
    assert [name for name, _ in commands(*words)] == expected


def test_variables_become_options() -> None:
    ((_, given),) = commands("build-index", "CORPUS=c", "INDEX=i", "PAIR=p", "ARGS=--dry-run")
    assert (given["corpus"], given["index"], given["pair"]) == ("c", "i", "p")
    assert given["dry_run"]
    ((_, given),) = commands("update", "ADD=a.jsonl", "DELETE=ids.txt")
    assert {Path("a.jsonl"), Path("ids.txt")} <= {*map(Path, (given["add"], given["delete"]))}
    (_, run), (_, report) = commands("cmedteb", "SYSTEMS=a b", "SPLIT=dev", "OUT=o")
    assert (run["systems"], run["split"], report["out"]) == (["a", "b"], "dev", Path("o"))
    ((_, given),) = commands("tradeoff", "PAIR=a")
    assert given["systems"] == ["a", "bm25", "bm25-characters"]
    ((_, given),) = commands("train", "RECIPE=r.yaml", "ARGS=--set seeds=[0]")
    assert (given["recipe"], given["changes"]) == (Path("r.yaml"), ["seeds=[0]"])


@pytest.mark.parametrize(
    ("words", "given", "port"),
    [
        ([], {}, "8000"),
        ([], {"CARE_PORT": "8001"}, "8001"),
        ([], {"CARE_PORT": "tcp://10.0.0.1:8080"}, "8000"),
        (["CARE_PORT=8002"], {"CARE_PORT": "tcp://10.0.0.1:8080"}, "8002"),
    ],
)
def test_the_port_is_not_the_address_of_a_service_of_kubernetes(
    words: list[str], given: dict[str, str], port: str
) -> None:
    show = ["--eval", 'show: ; @echo "$(CARE_PORT) $$CARE_PORT"', "show", *words]
    assert make(*show, **given).split() == [port, port]


def test_training_needs_a_recipe() -> None:
    with pytest.raises(typer.BadParameter):
        commands("train")


@pytest.mark.parametrize(
    ("words", "index", "pair"),
    [
        ([], "from-the-shell", "care-mini"),
        (["INDEX=mine"], "mine", "care-mini"),
        (["INDEX=mine", "PAIR=p.toml"], "mine", "p.toml"),
        (["INDEX=mine", "CARE_INDEX=other"], "other", "care-mini"),
    ],
)
def test_the_command_line_takes_precedence_over_the_shell(
    words: list[str], index: str, pair: str
) -> None:
    for target in ("build-index", "update", "evaluate"):
        ((_, given),) = commands(target, *words, CARE_INDEX="from-the-shell")
        named = given["pairs"] if target == "evaluate" else [given["pair"]]
        assert (given["index"], named) == (index, [pair])
    # The service reads the variables.
    show = ["--eval", 'show: ; @echo "$(CARE_INDEX) $(CARE_PAIR)"', "show", *words]
    assert make(*show, CARE_INDEX="from-the-shell").split() == [index, pair]
