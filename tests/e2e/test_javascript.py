"""The page of docs/clients.md, on another origin than the service."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from playwright.sync_api import Browser, expect

from core.service_process import running_service
from tests.docs.pages import ROOT, blocks

pytestmark = [pytest.mark.e2e, pytest.mark.browser]


class Handler(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Serves the files of a folder; yields the origin of their pages."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=folder))
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def write_page(folder: Path, url: str) -> None:
    for block in blocks(ROOT / "docs" / "clients.md"):
        if block.mark == "file" and block.value in ("care.mjs", "ask.html"):
            text = block.text.replace("http://127.0.0.1:8000", url)
            (folder / block.value).write_text(text, "utf-8")


def test_a_page_of_another_origin_searches_if_the_service_allows_it(
    browser: Browser, indexes: Path, tmp_path: Path
) -> None:
    with (
        serving(tmp_path) as allowed,
        serving(tmp_path) as other,
        running_service(indexes, "sample", CORS_ORIGINS=allowed) as service,
    ):
        write_page(tmp_path, service.url)
        page = browser.new_page()
        items = page.locator("li")
        page.goto(f"{allowed}/ask.html")
        page.click("button")
        expect(items).to_have_count(5)
        expect(items.first).to_contain_text("：")
        page.goto(f"{other}/ask.html")
        page.click("button")
        expect(items).to_have_text("Failed to fetch")
        page.close()
