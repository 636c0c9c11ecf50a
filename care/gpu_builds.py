"""Installs the builds of ONNX Runtime and FAISS for NVIDIA GPUs in place of those for processors.

    python -m care.gpu_builds [-c constraints.txt] [more arguments of pip install]

A build for GPUs has the modules of the build for processors under another distribution name. With
both installed, each has overwritten files of the other; with only the one for GPUs, every later
`pip install` of a package that requires the other name brings it back. So this program removes the
build for processors and installs a placeholder under its name: a distribution without files, with
version "<version>+gpu", which requires the build for GPUs and satisfies pip.

The modules of other packages are not needed: the program also runs by its path, in an environment
without the project.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_LOCAL = "+gpu"


@dataclass(frozen=True, slots=True)
class Library:
    """A library with a build for processors and one for GPUs."""

    cpu: str  # distribution of the build for processors, which the project requires
    gpu: str  # distribution of the build for GPUs
    extras: str = ""  # extras of the build for GPUs: the CUDA libraries that it loads

    @property
    def both(self) -> bool:
        """Whether both builds are installed, so that files of one are overwritten."""
        return bool(self.cpu_version and self.gpu_version)

    @property
    def cpu_version(self) -> str | None:
        """Version of the installed build for processors; None without it or for a placeholder."""
        found = installed(self.cpu)
        return None if found and found.endswith(_LOCAL) else found

    @property
    def gpu_version(self) -> str | None:
        """Version of the installed build for GPUs."""
        return installed(self.gpu)

    @property
    def placeholder(self) -> str:
        """Version of the placeholder for the installed build for GPUs."""
        return f"{self.gpu_version}".partition("+")[0] + _LOCAL

    @property
    def replaced(self) -> bool:
        """Whether the build for GPUs is installed, and its placeholder."""
        return installed(self.cpu) == self.placeholder


LIBRARIES = (
    Library("onnxruntime", "onnxruntime-gpu", "[cuda,cudnn]"),
    Library("faiss-cpu", "faiss-gpu"),
)


def installed(name: str) -> str | None:
    """Returns the version of an installed distribution, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def install(constraints: Path | None, arguments: Sequence[str] = ()) -> None:
    """Installs the builds for GPUs and the placeholders in the environment of this Python.

    Args:
        constraints: Constraints file of pip; without it the version of an installed build for
            processors is the newest that is installed.
        arguments: More arguments of `pip install`, such as other packages.
    """
    wanted = []
    for library in LIBRARIES:
        found = library.cpu_version
        newest = f"<={found}" if found and not constraints else ""
        wanted.append(f"{library.gpu}{library.extras}{newest}")
        if found:
            present = [name for name in (library.cpu, library.gpu) if installed(name)]
            _pip("uninstall", "--yes", *present)
    options = ["--constraint", str(constraints)] if constraints else []
    _pip("install", *options, *wanted, *arguments)
    with tempfile.TemporaryDirectory() as folder:
        missing = [library for library in LIBRARIES if not library.replaced]
        if wheels := [str(write_placeholder(library, Path(folder))) for library in missing]:
            _pip("install", "--no-deps", "--no-index", *wheels)


def write_placeholder(library: Library, folder: Path) -> Path:
    """Writes the wheel of the placeholder for the installed build for GPUs; returns its path."""
    stem = f"{library.cpu.replace('-', '_')}-{library.placeholder}"
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: {library.cpu}\n"
        f"Version: {library.placeholder}\n"
        f"Summary: Placeholder: {library.gpu} is installed in its place.\n"
        f"Requires-Dist: {library.gpu}{library.extras}=={library.gpu_version}\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: care\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",  # pip writes its own
    }
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, content in files.items():
            wheel.writestr(f"{stem}.dist-info/{name}", content)
    return path


def _pip(command: str, *arguments: str) -> None:
    program = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", command]
    subprocess.run([*program, *arguments], check=True)


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m care.gpu_builds",
        description="Installs the builds of ONNX Runtime and FAISS for NVIDIA GPUs. Other "
        "arguments are passed to pip install.",
    )
    parser.add_argument("-c", "--constraint", type=Path, metavar="FILE", help="constraints of pip")
    options, arguments = parser.parse_known_args()
    try:
        install(options.constraint, arguments)
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)


if __name__ == "__main__":
    main()
