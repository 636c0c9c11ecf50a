"""The distribution: it needs nothing of the project, and its wheel holds what it should."""

import ast
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "clients" / "python"
PROJECT = tomllib.loads((SOURCE / "pyproject.toml").read_text("utf-8"))["project"]
# The distribution of an imported package, where the names differ.
DISTRIBUTIONS = {
    "haystack": "haystack-ai",
    "llama_index": "llama-index-core",
    "mcp_types": "mcp",
    "typing_extensions": "typing-extensions",
}


def distribution(package: str) -> str:
    return DISTRIBUTIONS.get(package, package.replace("_", "-"))


def imported(path: Path) -> set[str]:
    """The top-level packages that a module imports, but those of Python and its own."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level
            names.add(node.module)
    tops = {name.partition(".")[0] for name in names}
    return tops - sys.stdlib_module_names - {"care_client"}


def required(requirements: list[str]) -> set[str]:
    return {requirement.partition(">")[0] for requirement in requirements}


@pytest.mark.parametrize(
    "path", sorted((SOURCE / "care_client").glob("*.py")), ids=lambda p: p.stem
)
def test_a_module_imports_only_what_it_or_its_extra_requires(path: Path) -> None:
    extra = PROJECT["optional-dependencies"].get(path.stem.replace("_", "-"), [])
    allowed = required(PROJECT["dependencies"]) | required(extra)
    assert {distribution(name) for name in imported(path)} <= allowed


def test_the_client_loads_no_framework() -> None:
    script = "import sys, care_client; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    tops = {name.partition(".")[0] for name in loaded}
    assert not tops & {"core", "service", "numpy", "torch", "faiss", "langchain_core", "mcp"}


@pytest.mark.e2e
def test_the_wheel_holds_the_package_and_its_licence(tmp_path: Path) -> None:
    build = f"from setuptools.build_meta import build_wheel; build_wheel({str(tmp_path)!r})"
    source = tmp_path / "source"
    subprocess.run(["cp", "-rL", str(SOURCE), str(source)], check=True)
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("care_client-*.whl")
    with zipfile.ZipFile(wheel) as files:
        names = {name for name in files.namelist() if ".dist-info/" not in name}
        licences = [name for name in files.namelist() if name.endswith("licenses/LICENSE")]
    package = SOURCE / "care_client"
    expected = {f"care_client/{path.name}" for path in package.iterdir() if path.is_file()}
    assert names == expected and "care_client/py.typed" in names
    assert len(licences) == 1
