import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from core.service_process import running_service
from tests.conftest import ADMIN_KEY, SEARCH_KEY

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.e2e  # all of this folder: without the marker, nothing here is imported

expect.set_options(timeout=30_000)  # a loaded machine takes longer than the default of 5 s

_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="session")
def indexes(sample: Path) -> Path:
    """The folder with the index of the sample corpus."""
    return sample / "indexes"


@pytest.fixture
def own_indexes(indexes: Path, tmp_path: Path) -> Path:
    """A copy of the index of the sample corpus that a test may change."""
    return Path(shutil.copytree(indexes, tmp_path / "indexes"))


@pytest.fixture(scope="session")
def url(indexes: Path) -> Iterator[str]:
    """The address of the real service with the index of the sample corpus."""
    with running_service(indexes, "sample") as service:
        yield service.url


@pytest.fixture(scope="session")
def closed_url(indexes: Path) -> Iterator[str]:
    """The address of a service with keys and small batches."""
    settings = {"API_KEYS": f"{ADMIN_KEY},{SEARCH_KEY}", "MAX_BATCH": "4"}
    with running_service(indexes, "sample", **settings) as service:
        yield service.url


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    names = ("chromium", "chromium-browser", "google-chrome")
    executable = next(filter(None, map(shutil.which, names)), None)
    if executable is None:
        reason = "Chromium is not installed: apt-get install chromium"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=_FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser, url: str) -> Iterator[Page]:
    """The page on a phone; fails if the page raises an error."""
    context = browser.new_context(viewport={"width": 360, "height": 740}, locale="zh-CN")
    page = context.new_page()
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on(
        "console",
        lambda message: faults.append(message.text) if "Policy" in message.text else None,
    )
    page.goto(url)
    yield page
    assert faults == []
    context.close()
