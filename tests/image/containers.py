"""Docker, or Podman with the same command line: containers, volumes and images."""

import os
import subprocess
import time
import urllib.error
import urllib.request

PROGRAM = os.environ.get("CONTAINERS", "docker")
IMAGE = os.environ.get("IMAGE", "care-retrieval")
_READY_WITHIN = 120.0


def engine(*arguments: str, timeout: float = 600) -> str:
    """Runs a command of Docker or Podman that must exit with status 0; returns its output."""
    result = subprocess.run(
        [PROGRAM, *arguments], capture_output=True, text=True, timeout=timeout, check=False
    )
    assert result.returncode == 0, (
        f"{PROGRAM} {' '.join(arguments)}\n{result.stdout}{result.stderr}"
    )
    return result.stdout


def run(*arguments: str, name: str | None = None, detach: bool = False) -> str:
    """Runs a container: options, image, command; it is deleted afterwards unless it has a name."""
    options = ["--name", name] if name else ["--rm"]
    # Podman's defaults may be above the limits of this process.
    options += ["--ulimit", "nofile=4096:4096", "--ulimit", "nproc=4096:4096"]
    if detach:
        options.append("--detach")
    if PROGRAM == "podman":
        # Otherwise --read-only mounts a tmpfs where Docker and Kubernetes do not.
        options.append("--read-only-tmpfs=false")
    # Podman runs health checks with systemd, which not every machine has.
    return engine("run", "--no-healthcheck", *options, *arguments)


def wait_until_ready(name: str, url: str) -> None:
    """Waits until the service in a container is ready."""
    end = time.monotonic() + _READY_WITHIN
    while time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"{url}/health/ready", timeout=10):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise AssertionError(f"{name} is not ready:\n{engine('logs', name)}")
