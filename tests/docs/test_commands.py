"""The commands of README.md and docs/ work: each page is run as one session in one folder.

Pages that start servers are run by `test_servers.py`.
"""

from pathlib import Path

import pytest

from tests.docs.sessions import pages_to_run, run_page

pytestmark = pytest.mark.e2e


# Some pages train or export a pair, which takes minutes on a busy machine.
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", pages_to_run(serving=False), ids=lambda page: page.stem)
def test_the_commands_of_a_page_work_one_after_the_other(
    page: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    run_page(page, tmp_path / "checkout", capsys, request)
