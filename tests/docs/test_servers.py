"""The commands of pages that start servers work; see `test_commands.py`."""

from pathlib import Path

import pytest

from tests.docs.sessions import pages_to_run, run_page

pytestmark = pytest.mark.e2e


# Some pages train or export a pair, which takes minutes on a busy machine.
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", pages_to_run(serving=True), ids=lambda page: page.stem)
def test_the_servers_of_a_page_and_its_other_commands_work(
    page: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    run_page(page, tmp_path / "checkout", capsys, request)
