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


@pytest.mark.parametrize("allowed", [True, False])
def test_a_page_of_another_origin_searches_if_the_service_allows_it(
    browser: Browser, indexes: Path, tmp_path: Path, allowed: bool
) -> None:
    with serving(tmp_path) as origin:
        origins = origin if allowed else "http://127.0.0.1:1"
        with running_service(indexes, "sample", CORS_ORIGINS=origins) as service:
            write_page(tmp_path, service.url)
            page = browser.new_page()
            page.goto(f"{origin}/ask.html")
            page.click("button")
            items = page.locator("li")
            expect(items).to_have_count(5 if allowed else 1)
            if allowed:
                expect(items.first).to_contain_text("：")
            else:
                expect(items).to_have_text("Failed to fetch")
            page.close()
