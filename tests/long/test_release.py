"""`make release`, from the commit: what it builds works where nothing else is installed."""

import hashlib
import subprocess
from pathlib import Path

import pytest

from tests.docs.pages import ROOT


@pytest.mark.timeout(1800)
def test_a_release_is_built_and_checked(tmp_path: Path) -> None:
    out = tmp_path / "dist"
    done = subprocess.run(
        ["make", "release", f"ARGS=--out {out}"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    sums = dict(
        reversed(line.split()) for line in (out / "SHA256SUMS").read_text("utf-8").splitlines()
    )
    assert len(sums) == 4
    for name, digest in sums.items():
        assert hashlib.sha256((out / name).read_bytes()).hexdigest() == digest
        assert f"checking {name}" in done.stdout
    assert "image" in done.stdout
