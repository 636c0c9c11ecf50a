"""Builds for GPUs in place of those for processors: stand-in wheels, installed by make and pip."""

import os
import re
import shutil
import subprocess
import textwrap
import tomllib
import venv
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pip
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from care.gpu_builds import LIBRARIES

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
PINS = {
    canonicalize_name(name): version
    for name, version in re.findall(
        r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE
    )
}
MODULES = {"onnxruntime": "onnxruntime", "faiss-cpu": "faiss"}
TENSORRT = "tensorrt-cu13"
# Writes an editable wheel of this project's metadata, without setuptools.
BACKEND = """
    import tomllib, zipfile

    def build_editable(folder, config_settings=None, metadata_directory=None):
        project = tomllib.load(open("pyproject.toml", "rb"))["project"]
        lines = ["Metadata-Version: 2.1", f"Name: {project['name']}", "Version: 0.1.0"]
        lines += [f"Requires-Dist: {line}" for line in project["dependencies"]]
        for extra, needed in project["optional-dependencies"].items():
            lines += [f"Provides-Extra: {extra}"]
            lines += [f"Requires-Dist: {line}; extra == '{extra}'" for line in needed]
        name = "care_retrieval-0.1.0"
        with zipfile.ZipFile(f"{folder}/{name}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}.dist-info/METADATA", "\\n".join(lines) + "\\n")
            wheel.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\\n")
            wheel.writestr(f"{name}.dist-info/RECORD", "")
        return f"{name}-py3-none-any.whl"
"""


def write_wheel(folder: Path, name: str, version: str, module: str | None = None) -> None:
    """Writes a wheel whose module, if it has one, knows the name of its distribution."""
    stem = f"{name.replace('-', '_')}-{version}"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        facts = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        wheel.writestr(f"{stem}.dist-info/METADATA", facts)
        wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n")
        wheel.writestr(f"{stem}.dist-info/RECORD", "")
        if module:
            wheel.writestr(f"{module}/__init__.py", f"BUILD = {name!r}\n")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout whose packages can be installed from stand-in wheels only."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("Makefile", "constraints.txt", "care/gpu_builds.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    system, rest = (ROOT / "pyproject.toml").read_text("utf-8").split("[project]\n", 1)
    own = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    assert system.startswith("[build-system]")
    (folder / "pyproject.toml").write_text(f"{own}[project]\n{rest}", "utf-8")
    (folder / "backend.py").write_text(textwrap.dedent(BACKEND))
    wheels = folder / "wheels"
    wheels.mkdir()
    extras = PROJECT["optional-dependencies"]
    for line in [*PROJECT["dependencies"], *extras["eval"], *extras["gpu"], TENSORRT]:
        name = canonicalize_name(Requirement(line).name)
        builds = {library.gpu: library.cpu for library in LIBRARIES}
        write_wheel(wheels, name, PINS[name], MODULES.get(builds.get(name, name)))
    # make installs into an environment that exists; installing pip takes seconds.
    venv.create(folder / ".venv", with_pip=False, symlinks=True)
    for path in Path(pip.__file__).parents[1].glob("pip*"):
        (site_packages(folder) / path.name).symlink_to(path)
    return folder


def site_packages(checkout: Path) -> Path:
    (site,) = (checkout / ".venv" / "lib").glob("*/site-packages")
    return site


def run(checkout: Path, *command: str | Path) -> str:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "MAKE", "CARE"))}
    environment = inherited | {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(checkout / "wheels"),
    }
    done = subprocess.run(
        command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def builds(checkout: Path) -> set[str]:
    """Returns the distributions whose modules Python imports in the environment `.venv`."""
    code = "import onnxruntime, faiss; print(onnxruntime.BUILD, faiss.BUILD)"
    return set(run(checkout, ".venv/bin/python", "-c", code).split())


def versions(checkout: Path) -> dict[str, str]:
    found = distributions(path=[str(site_packages(checkout))])
    return {one.name: one.version for one in found}


@pytest.mark.e2e
def test_the_builds_for_gpus_replace_the_others_and_stay(checkout: Path) -> None:
    for_processors = {library.cpu for library in LIBRARIES}
    for_gpus = {library.gpu for library in LIBRARIES}
    pip = (".venv/bin/python", "-m", "pip", "install", "--quiet")
    run(checkout, "make", ".venv/.base")
    assert builds(checkout) == for_processors
    # The extra alone installs one build over the other.
    run(checkout, *pip, "-e", ".[gpu]")
    assert for_processors | for_gpus <= set(versions(checkout))
    run(checkout, "make", "gpu", f"ARGS={TENSORRT}")
    assert builds(checkout) == for_gpus
    found = versions(checkout)
    for library in LIBRARIES:
        assert found[library.cpu] == f"{PINS[library.cpu]}+gpu"
        assert found[library.gpu] == PINS[library.gpu]
    assert found[TENSORRT] == PINS[TENSORRT]
    # The environment of make export too: it measures on the GPU and builds engines.
    commands = run(checkout, "make", "--dry-run", ".venv-test/.complete")
    assert ".venv-test/bin/python care/gpu_builds.py" in commands
    # A changed pyproject.toml: make evaluate installs the environment again, and its extra.
    os.utime(checkout / "pyproject.toml")
    run(checkout, "make", ".venv/.eval")
    assert builds(checkout) == for_gpus
    run(checkout, *pip, "-e", ".")
    assert builds(checkout) == for_gpus


def test_the_extra_and_the_constraints_have_the_builds() -> None:
    extra = {Requirement(line).name: line for line in PROJECT["optional-dependencies"]["gpu"]}
    required = {Requirement(line).name for line in PROJECT["dependencies"]}
    assert set(extra) == {library.gpu for library in LIBRARIES}
    for library in LIBRARIES:
        assert library.cpu in required
        assert extra[library.gpu].startswith(f"{library.gpu}{library.extras}>")
        assert PINS[library.gpu] == PINS[library.cpu]


def test_both_environments_name_the_same_libraries_of_cuda() -> None:
    def pinned(name: str) -> dict[str, str]:
        lines = (ROOT / name).read_text("utf-8").splitlines()
        return dict(line.split("==") for line in lines if line.startswith("nvidia-"))

    own, vllm = pinned("constraints.txt"), pinned("constraints-vllm.txt")
    assert own.items() <= vllm.items()
    # What the builds of ONNX Runtime and FAISS load; unpinned, pip takes the newest of CUDA.
    for library in ("cublas", "cuda-nvrtc", "cuda-runtime", "curand"):
        assert {f"nvidia-{library}", f"nvidia-{library}-cu12"} <= own.keys()
    assert {"nvidia-cudnn-cu13", "nvidia-cufft", "nvidia-nvjitlink"} <= own.keys()
