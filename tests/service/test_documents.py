"""What docs/ holds that is made from the code is as `make docs` writes it."""

import runpy
from pathlib import Path

from docs.settings_table import PAGE, with_table

DOCS = Path(__file__).parents[2] / "docs"


def test_the_committed_contract_is_that_of_the_code() -> None:
    text = runpy.run_path(str(DOCS / "openapi.py"))["openapi_text"]()
    assert (DOCS / "openapi.json").read_text("utf-8") == text, "run make docs"


def test_the_settings_table_is_that_of_the_code() -> None:
    page = PAGE.read_text("utf-8")
    assert with_table(page) == page, "run make docs"
