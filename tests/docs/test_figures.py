"""Figures in documents are those of the results that commands have written."""

from pathlib import Path

import pytest

from docs.figures import ROOT, TABLES, filled, written

DOCUMENTS = written()


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_document_has_the_figures_of_the_results(path: Path) -> None:
    assert path.read_text("utf-8") == DOCUMENTS[path], "run make figures"


def test_each_table_is_in_a_document() -> None:
    text = "".join(DOCUMENTS.values())
    assert {name for name in TABLES if f"<!-- figures: {name} -->" not in text} == set()


def test_a_region_is_replaced_and_the_rest_stays() -> None:
    text = "a\n<!-- figures: one -->\n| old |\n<!-- end of figures -->\n| b |\n"
    once = filled(text, {"one": lambda: "| new |"})
    assert once == "a\n<!-- figures: one -->\n\n| new |\n\n<!-- end of figures -->\n| b |\n"
    assert filled(once, {"one": lambda: "| new |"}) == once
    with pytest.raises(KeyError):
        filled(text, {})
