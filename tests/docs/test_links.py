"""Links, anchors and variables in the documents exist."""

import re
import subprocess
from pathlib import Path

import pytest

from service.settings import known_variables
from tests.docs.pages import ROOT

_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s]*)\)")


def documents() -> list[Path]:
    """All Markdown files that are not results, which commands write."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    return [ROOT / name for name in listed if "/results/" not in name and (ROOT / name).exists()]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", page.read_text("utf-8")), re.MULTILINE)
    texts = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in texts}


@pytest.mark.parametrize("page", documents(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    for target in _LINK.findall(_FENCE.sub("", page.read_text("utf-8"))):
        name, _, anchor = target.partition("#")
        linked = page.parent / name if name else page
        assert linked.exists(), target
        if anchor and linked.suffix == ".md":
            assert anchor in anchors(linked), target


@pytest.mark.parametrize("page", documents(), ids=lambda page: str(page.relative_to(ROOT)))
def test_variables_that_are_named_exist(page: Path) -> None:
    if page.name == "CHANGELOG.md":
        return  # names what was removed too
    named = set(re.findall(r"\bCARE_[A-Z_]+[A-Z]\b", page.read_text("utf-8")))
    assert named <= known_variables() | {"CARE_TEST_MILVUS_URI"}  # of the tests


def test_the_documents_that_code_names_exist() -> None:
    found = subprocess.run(
        ["git", "grep", "-hoE", r"[a-z/]*docs/[A-Za-z0-9_/-]+\.(md|json|py)", ":!CHANGELOG.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    named = {name for name in found if name.startswith("docs/")}
    assert len(named) > 10
    assert sorted(name for name in named if not (ROOT / name).exists()) == []
