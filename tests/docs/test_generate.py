"""What documents take from the code and from results is as `make docs` writes it."""

from pathlib import Path

import pytest

from docs.figures import TABLES
from docs.generate import DOCS, SECURITY, filled, generated
from service.settings import Settings

FILES = generated()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(DOCS.parent)))
def test_the_committed_file_is_that_of_the_code(path: Path) -> None:
    assert path.read_text("utf-8") == FILES[path], "run make docs"


def test_each_reference_is_generated_or_checked() -> None:
    checked = DOCS / "reference" / "errors.md"  # by test_errors.py
    assert set((DOCS / "reference").iterdir()) == {
        checked,
        *(path for path in FILES if path.parent.name == "reference"),
    }


def test_each_table_is_in_a_document() -> None:
    text = "".join(FILES.values())
    assert {name for name in TABLES if f"<!-- figures: {name} -->" not in text} == set()


def test_a_region_is_replaced_and_the_rest_stays() -> None:
    text = "a\n<!-- figures: one -->\n| old |\n<!-- end of figures -->\n| b |\n"
    once = filled(text, {"one": lambda: "| new |"})
    assert once == "a\n<!-- figures: one -->\n\n| new |\n\n<!-- end of figures -->\n| b |\n"
    assert filled(once, {"one": lambda: "| new |"}) == once
    with pytest.raises(KeyError):
        filled(text, {})


def test_the_limits_of_settings_are_in_the_security_policy() -> None:
    """Each setting with a limit for clients is a row, with its default."""
    text = FILES[SECURITY]
    for name in ("max_body_bytes", "max_requests", "timeout_ms", "rate_limit", "drain_seconds"):
        default = Settings.model_fields[name].default
        assert f"| `CARE_{name.upper()}` | `{default}` |" in text
