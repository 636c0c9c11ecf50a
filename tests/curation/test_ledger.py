import os
import sqlite3
from pathlib import Path

from core.errors import CareError
from curation.ledger import Ledger, Outcome
from tests.errors import raises


def test_a_ledger_of_an_earlier_version(tmp_path: Path) -> None:
    path = tmp_path / "calls.sqlite"
    with Ledger(path) as ledger:
        ledger.end(ledger.begin("key", "judge", 1, 1), "rejected", 0, 0, "status 400")
    with sqlite3.connect(path) as database:
        database.execute("UPDATE calls SET state = 'refused'")
        database.execute("CREATE UNIQUE INDEX final ON calls (key) WHERE state IN ('refused')")
    with Ledger(path) as ledger:
        assert ledger.outcome("key") == Outcome("rejected", "status 400")


def test_a_file_that_is_not_a_ledger(tmp_path: Path) -> None:
    path = tmp_path / "calls.sqlite"
    path.write_bytes(os.urandom(4096))
    with raises(CareError, code="not_ledger", path=path):
        Ledger(path)
