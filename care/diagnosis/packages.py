"""Checks of the installed packages and their versions."""

import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec
from pathlib import Path

from care.diagnosis.finding import Finding
from care.extras import missing
from care.gpu_builds import LIBRARIES, Library, installed
from core.errors import CareError

# What the extras that users install are for.
_EXTRAS = {
    "eval": "care evaluate",
    "train": "care train and care export, with torch",
    "cmedteb": "care cmedteb, with torch",
    "curation": "care curate",
    "milvus": "indexes in Milvus",
    "distributed": "Ray, and Milvus",
    "openai": "--backend openai",
    "openvino": "--backend openvino, which encodes documents faster on processors",
    "tracing": "traces of the service",
    "vllm": "--backend vllm on GPUs, in an environment of its own",
}
_NEEDS_TORCH = ("train", "cmedteb")
_CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
INSTALL_GPU_BUILDS = "python -m care.gpu_builds (in a checkout: make gpu)"
_PIN = re.compile(r"([\w.-]+)==([^\s;]+)")
_NAME = re.compile(r"[\w.-]+")
_SHOWN = 5
# Each environment has its own, and no command uses it.
_UNCHECKED = "setuptools"


def check_packages() -> Iterator[Finding]:
    """Checks that required packages are installed, in tested versions, and lists extras."""
    try:
        listed = requires("care-retrieval") or []
    except PackageNotFoundError:
        advice = "In a checkout: pip install -c constraints.txt -e ."
        yield Finding("packages", "error", "care-retrieval is not installed", advice)
        return
    needed = [name[0] for line in listed if "extra ==" not in line and (name := _NAME.match(line))]
    replaced = [library.cpu for library in LIBRARIES if library.gpu_version]
    if absent := [name for name in needed if name not in replaced and not installed(name)]:
        advice = "Install them: pip install care-retrieval."
        yield Finding("packages", "error", f"not installed: {', '.join(absent)}", advice)
    else:
        yield check_versions()
    for library in LIBRARIES:
        yield check_build(library)
    for extra, purpose in _EXTRAS.items():
        try:
            absent = missing(extra)
        except CareError as error:
            yield Finding.of(f"extra {extra}", error)
            continue
        if extra in _NEEDS_TORCH and find_spec("torch") is None:
            absent.append("torch")
        if absent:
            torch = "torch " if "torch" in absent else ""
            advice = f"If you need it: pip install {torch}'care-retrieval[{extra}]'."
            found = f"{purpose}: not installed (optional): {', '.join(absent)}"
            yield Finding(f"extra {extra}", "optional", found, advice)
        else:
            yield Finding(f"extra {extra}", "ok", f"{purpose}: installed")


def check_build(library: Library) -> Finding:
    """Checks that a library is installed in one build, for processors or for GPUs."""
    found = [name for name in (library.cpu, library.gpu) if installed(name)]
    listed = ", ".join(f"{name} {installed(name)}" for name in found) or "not installed"
    if not library.gpu_version and library.cpu_version:
        return Finding("build", "ok", f"{listed}, for processors")
    if library.replaced:
        return Finding("build", "ok", f"{library.gpu} {library.gpu_version}, for GPUs")
    advice = f"Install the build for GPUs alone, in a way that lasts: {INSTALL_GPU_BUILDS}."
    if library.both:
        return Finding(
            "build", "error", f"{listed}: one has overwritten files of the other", advice
        )
    if library.gpu_version:
        found_alone = f"{listed}: the next pip install may put {library.cpu} over it"
        return Finding("build", "warning", found_alone, advice)
    return Finding("build", "error", f"{listed}, but no {library.gpu}", advice)


def check_versions(constraints: Path = _CONSTRAINTS) -> Finding:
    """Compares installed versions with those that are tested, which a checkout lists."""
    try:
        pins = _PIN.findall(constraints.read_text(encoding="utf-8"))
    except OSError:
        return Finding("packages", "ok", "all required packages are installed")
    others = [
        f"{name} {found} (tested: {tested})"
        for name, tested in pins
        if name != _UNCHECKED
        and (found := installed(name))
        and found.partition("+")[0] != tested.partition("+")[0]
    ]
    if not others:
        return Finding("packages", "ok", "all required packages are installed, as tested")
    more = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
    advice = "Install the tested versions: pip install -c constraints.txt -e ."
    return Finding("packages", "warning", ", ".join(others[:_SHOWN]) + more, advice)
