import io
import sys

import pytest

from core import progress
from core.progress import progress_bar, write_above


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stderr", [io.StringIO(), Terminal()])
def test_bars_are_for_terminals(stderr: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stderr)
    assert list(progress_bar("read", range(3), unit="texts")) == [0, 1, 2]
    with progress_bar("write", total=2) as bar:
        bar.update(2)
    write_above("retried \x1b")
    written = stderr.getvalue()
    if stderr.isatty():
        assert all(part in written for part in ("3/3", "2/2", "retried \\x1b\n"))
    else:
        assert written == "retried \\x1b\n"


def test_long_work_writes_lines_into_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(progress, "_LOG_INTERVAL", 0.0)
    with progress_bar("outer", total=2, leave=False) as outer:
        for number in progress_bar("inner", range(3)):
            outer.update(number)
    lines = stderr.getvalue().split("\n")
    assert {line.split(":")[0].strip() for line in lines if line} == {"outer", "inner"}
    assert any("3/3" in line for line in lines)
    assert not set(stderr.getvalue()) & set("\r\x1b")


@pytest.mark.parametrize("show", [True, False])
def test_without_standard_error_work_goes_on(show: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert list(progress_bar("read", range(3), show=show)) == [0, 1, 2]
