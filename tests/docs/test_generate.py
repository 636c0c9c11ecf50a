"""What is generated from the code is as `make docs` writes it."""

from pathlib import Path

import pytest

from docs.generate import DOCS, SECURITY, generated
from service.settings import Settings

FILES = generated()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_committed_file_is_that_of_the_code(path: Path) -> None:
    assert path.read_text("utf-8") == FILES[path], "run make docs"


def test_each_reference_is_generated_or_checked() -> None:
    checked = DOCS / "reference" / "errors.md"  # by test_errors.py
    assert set((DOCS / "reference").iterdir()) == {
        checked,
        *(path for path in FILES if path.parent.name == "reference"),
    }


def test_the_limits_of_settings_are_in_the_security_policy() -> None:
    """Each setting with a limit for clients is a row, with its default."""
    text = SECURITY.read_text("utf-8")
    for name in ("max_body_bytes", "max_requests", "timeout_ms", "rate_limit", "drain_seconds"):
        default = Settings.model_fields[name].default
        assert f"| `CARE_{name.upper()}` | `{default}` |" in text
