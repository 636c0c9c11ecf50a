import subprocess
import sys

PRINTS_MUCH = "from core.cli import run\nraise SystemExit(run(lambda: print('line\\n' * 100_000)))"


def test_a_reader_that_ends_early_is_no_error() -> None:
    command = [sys.executable, "-c", PRINTS_MUCH]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == b"line\n"
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(30) == 141
