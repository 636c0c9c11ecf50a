"""`make release`: builds what a release consists of, and checks each part in an empty environment.

The folder gets a wheel and a source distribution of care-retrieval and of care-client, and their
checksums. They are made from the commit: changed files are not in them. The image is built and
checked where Docker or Podman runs.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
PROJECTS = {"care-retrieval": ".", "care-client": "clients/python"}
# What an environment with the distribution must do, by its programs.
CHECKS = {
    "care-retrieval": (
        ["python", "-m", "pip", "check"],
        ["python", "-c", "import importlib.util as i; assert not i.find_spec('torch'), 'torch'"],
        ["care", "--version"],
        ["care", "demo", "--check", "--port", "0"],
    ),
    "care-client": (
        ["python", "-m", "pip", "check"],
        ["python", "-c", "from care_client import AsyncClient, Client; Client('http://127.0.0.1')"],
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder that is replaced")
    out = parser.parse_args().out.absolute()
    if run("git", "status", "--porcelain", folder=ROOT):
        say("the files that are changed or new since the last commit are not in the release")
    with TemporaryDirectory(prefix="care-release-") as temporary:
        source = Path(temporary) / "source"
        source.mkdir()
        run("sh", "-c", f"git archive HEAD | tar -x -C '{source}'", folder=ROOT)
        versions = dict(read_versions(source))
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        for name, folder in PROJECTS.items():
            say(f"building {name} {versions[name]}")
            run(sys.executable, "-m", "build", "--outdir", str(out), folder, folder=source)
        files = sorted(out.iterdir())
        for file in files:
            check(file, source / "constraints.txt", Path(temporary) / f"check-{file.name}")
        sums = (f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files)
        (out / "SHA256SUMS").write_text("".join(sums), "utf-8")
        build_image(source, versions["care-retrieval"])
    for file in files:
        say(f"{file}  {file.stat().st_size / 1e6:.1f} MB")


def read_versions(source: Path) -> Iterator[tuple[str, str]]:
    """Yields the version of each distribution; the changelog must have that of the first."""
    changes = (source / "CHANGELOG.md").read_text("utf-8").splitlines()
    for name, folder in PROJECTS.items():
        facts = tomllib.loads((source / folder / "pyproject.toml").read_text("utf-8"))
        version = facts["project"]["version"]
        if name == "care-retrieval" and not any(
            line.startswith(f"## {version} ") for line in changes
        ):
            sys.exit(f"error: CHANGELOG.md has no section '## {version} (DATE)'")
        yield name, version


def check(file: Path, constraints: Path, folder: Path) -> None:
    """Installs a file into an environment without packages, and runs its checks elsewhere."""
    say(f"checking {file.name}")
    (folder / "empty").mkdir(parents=True)
    venv.create(folder / "venv", with_pip=True)
    programs = folder / "venv" / "bin"
    install = ("-m", "pip", "install", "--quiet", "-c", str(constraints), str(file))
    run(str(programs / "python"), *install, folder=folder)
    name = next(name for name in CHECKS if file.name.startswith(name.replace("-", "_")))
    for program, *arguments in CHECKS[name]:
        run(str(programs / program), *arguments, folder=folder / "empty")
    shutil.rmtree(folder)


def build_image(source: Path, version: str) -> None:
    """Builds the image and runs the demo in it, if there is a program that can."""
    for program in ("docker", "podman"):
        if (
            shutil.which(program)
            and not subprocess.run([program, "info"], capture_output=True).returncode
        ):
            break
    else:
        say("the image is skipped: neither Docker nor Podman runs on this machine")
        return
    image = f"care-retrieval:{version}"
    say(f"building and checking the image {image}")
    run("make", "image", f"IMAGE={image}", folder=source)
    run(program, "run", "--rm", image, "care", "demo", "--check", "--port", "0", folder=source)


def run(*command: str, folder: Path) -> str:
    """Runs a command without variables of this project; returns what it prints."""
    kept = {
        name: text for name, text in os.environ.items() if not name.startswith(("CARE_", "PYTHON"))
    }
    done = subprocess.run(command, cwd=folder, env=kept, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}error: {' '.join(command)}: status {done.returncode}")
    return done.stdout


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
