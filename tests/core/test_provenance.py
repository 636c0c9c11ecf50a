import sys

import numpy as np
import pytest

from core.provenance import environment, library_versions


def test_versions_of_loaded_libraries_are_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    assert library_versions()["numpy"] == np.__version__
    monkeypatch.delitem(sys.modules, "tokenizers", raising=False)
    assert "tokenizers" not in library_versions()


def test_libraries_of_another_process_are_included(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "tokenizers", raising=False)
    libraries = environment("tokenizers")["libraries"]
    assert isinstance(libraries, dict) and libraries["tokenizers"]
