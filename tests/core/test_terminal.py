import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from core.terminal import shown, shown_json, shown_lines
from tests.errors import error_code

# Ranges of characters that act on a terminal or on the direction of its text.
ACTIVE = [
    chr(code)
    for first, last in [
        (0, 0x1F),
        (0x7F, 0x9F),
        (0x61C, 0x61C),
        (0x200E, 0x200F),
        (0x2028, 0x202E),
        (0x2066, 0x2069),
        (0xD800, 0xDFFF),
    ]
    for code in range(first, last + 1)
]


def test_characters_that_act_on_a_terminal_are_escaped() -> None:
    for character in ACTIVE:
        found = shown(f"头{character}痛")
        assert (found[0], found[1], found[-1]) == ("头", "\\", "痛")
        assert not set(found) & set(ACTIVE)
    assert shown("\x1b[2J\u202e\x9b\r") == r"\x1b[2J\u202e\x9b\r"


@pytest.mark.parametrize("text", ["头痛　２００ｍｇ", "é–…", "👨\u200d👩", "\ue000", "\\x1b"])
def test_other_characters_stay(text: str) -> None:
    assert shown(text) == text


def test_lines_stay_lines() -> None:
    assert shown_lines("a\x1b\nb\u2028") == "a\\x1b\nb\\u2028"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "gbk", "ascii", "latin-1", "shift_jis"])
def test_json_is_valid_in_each_encoding(encoding: str) -> None:
    values = [*ACTIVE, "头痛é😀\U00020bb7"]
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    text = shown_json(json.dumps(values, ensure_ascii=False), stream)
    assert not set(text) & set(ACTIVE)
    assert json.loads(text.encode(encoding).decode(encoding)) == values
    assert ("头" in text) == encoding.startswith("utf")


def command(code: str) -> list[str]:
    """A process that runs `code` as a command."""
    program = f"import sys\nfrom core.terminal import run\ndef command():\n    {code}\n"
    return [sys.executable, "-c", f"{program}raise SystemExit(run(command))"]


def test_a_reader_that_ends_early_is_no_error() -> None:
    called = command("print('line\\n' * 100_000)")
    with subprocess.Popen(called, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == b"line\n"
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(30) == 141


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_short_output_without_a_reader(stream: str) -> None:
    read, write = os.pipe()
    os.close(read)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | {stream: write}
    done = subprocess.run(command(f"print('头痛', file=sys.{stream})"), check=False, **pipes)
    os.close(write)
    assert (done.returncode, done.stdout or b"", done.stderr or b"") == (141, b"", b"")


def test_a_full_disk_is_an_error() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command("print('text')"), stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, error_code(done.stderr)) == (1, "input_output")
    assert done.stderr.count("\n") == 1


def test_the_status_of_a_failed_command_without_standard_error() -> None:
    code = "from core.errors import CareError; raise CareError('wrong')"
    with Path("/dev/full").open("w") as full:
        assert subprocess.run(command(code), stderr=full, check=False).returncode == 1


@pytest.mark.parametrize("closed", [[1], [2], [1, 2]])
def test_closed_streams(closed: list[int]) -> None:
    close: Callable[[], object] = lambda: [os.close(number) for number in closed]  # noqa: E731
    code = "print('text'); sys.stderr.write('text'); print(open('/dev/null').fileno() > 2)"
    done = subprocess.run(command(code), preexec_fn=close, capture_output=True, check=False)
    assert done.returncode == 0
    assert done.stdout == (b"" if 1 in closed else b"text\nTrue\n")


@pytest.mark.parametrize("encoding", ["gbk", "ascii", "latin-1", "utf-16", "utf-8"])
def test_each_character_can_be_written_in_each_encoding(encoding: str) -> None:
    text = "头痛é😀\ud800"
    code = f"print({text!a}); print({text!a}, file=sys.stderr)"
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    done = subprocess.run(command(code), env=environment, capture_output=True, check=False)
    assert done.returncode == 0
    expected = text.encode(encoding, "backslashreplace").decode(encoding)
    assert done.stdout.decode(encoding) == done.stderr.decode(encoding) == f"{expected}\n"
