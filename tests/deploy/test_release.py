"""What `make release` refuses; tests/long runs it."""

import subprocess
import sys
from pathlib import Path

from tests.docs.pages import ROOT


def write(folder: Path, version: str, changes: str) -> None:
    for name, distribution in ((".", "care-retrieval"), ("clients/python", "care-client")):
        (folder / name).mkdir(parents=True, exist_ok=True)
        text = f'[project]\nname = "{distribution}"\nversion = "{version}"\n'
        (folder / name / "pyproject.toml").write_text(text)
    (folder / "CHANGELOG.md").write_text(changes)


def versions(folder: Path) -> "subprocess.CompletedProcess[str]":
    code = "import sys, pathlib; from deploy.release import read_versions; "
    code += "print(dict(read_versions(pathlib.Path(sys.argv[1]))))"
    command = [sys.executable, "-c", code, str(folder)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_a_release_has_a_section_in_the_changelog(tmp_path: Path) -> None:
    write(tmp_path, "0.2.0", "# Changelog\n\n## Unreleased\n\n## 0.2.0 (2027-01-01)\n")
    assert versions(tmp_path).stdout == "{'care-retrieval': '0.2.0', 'care-client': '0.2.0'}\n"
    write(tmp_path, "0.2.1", "# Changelog\n\n## Unreleased\n\n## 0.2.0 (2027-01-01)\n")
    refused = versions(tmp_path)
    assert refused.returncode == 1
    assert "0.2.1" in refused.stderr


def test_this_version_has_one() -> None:
    assert versions(ROOT).returncode == 0
