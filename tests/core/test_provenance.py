import sys

import numpy as np
import pytest

from core import provenance
from core.provenance import environment, library_versions


def test_versions_of_loaded_libraries_are_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    assert library_versions()["numpy"] == np.__version__
    monkeypatch.delitem(sys.modules, "tokenizers", raising=False)
    assert "tokenizers" not in library_versions()


def test_libraries_of_another_process_are_included(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "tokenizers", raising=False)
    libraries = environment("tokenizers")["libraries"]
    assert isinstance(libraries, dict) and libraries["tokenizers"]


def test_hardware_names_the_instructions_that_decide_the_speed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(provenance, "cpu_flags", lambda: {"fpu", "avx512f", "avx2"})
    assert provenance.hardware()["instructions"] == ["avx2", "avx512f"]
