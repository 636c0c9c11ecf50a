"""The search page in a real browser."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import httpx2
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from core.service_process import running_service
from indexer.__main__ import main
from tests.conftest import ADMIN_KEY, SEARCH_KEY, make_records, write_jsonl

pytestmark = [pytest.mark.e2e, pytest.mark.browser]

_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


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
    """The page on a phone, with every error in it collected."""
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


def ask(page: Page, question: str) -> None:
    page.fill("#query", question)
    page.press("#query", "Enter")


def test_a_question_shows_hits_with_scores_and_stage_times(page: Page) -> None:
    ask(page, "血压高的人平时吃饭要注意什么")
    expect(page.locator("#hits li[data-id]")).to_have_count(10)
    first = page.locator("#hits li[data-id]").first
    expect(first.locator(".score")).to_contain_text(re.compile(r"0\.\d+"))
    expect(first).to_contain_text("血压")
    expect(page.locator("#status")).to_contain_text("10")
    expect(page.locator("#timings")).to_contain_text("编码")


def test_a_department_chip_filters_the_hits(page: Page) -> None:
    ask(page, "发烧怎么办")
    expect(page.locator("#hits li[data-id]")).to_have_count(10)
    page.locator('button[data-department="儿科"]').click()
    expect(page.locator('button[data-department="儿科"]')).to_have_attribute("aria-pressed", "true")
    expect(page.locator("#hits li[data-id]:not(:has-text('儿科'))")).to_have_count(0)
    expect(page.locator("#hits li[data-id]:has-text('儿科')")).to_have_count(10)


def test_an_example_question_can_be_clicked(page: Page) -> None:
    page.locator(".example").first.click()
    expect(page.locator("#hits li[data-id]")).to_have_count(10)


def test_an_error_is_shown_with_its_reason_and_without_hits(page: Page) -> None:
    ask(page, "发烧怎么办")
    expect(page.locator("#hits li[data-id]")).to_have_count(10)
    ask(page, "长" * 2500)
    expect(page.locator("#error")).to_be_visible()
    expect(page.locator("#error")).to_contain_text("2000")
    expect(page.locator("#hits li")).to_have_count(0)


def test_a_question_without_words_leaves_no_hits_of_the_last(page: Page) -> None:
    ask(page, "发烧怎么办")
    expect(page.locator("#hits li[data-id]")).to_have_count(10)
    ask(page, " ")
    expect(page.locator("#query")).to_have_attribute("aria-invalid", "true")
    expect(page.locator("#hits li")).to_have_count(0)
    expect(page.locator("#timings")).to_be_hidden()


def test_bars_tell_the_scores_of_one_answer_apart(page: Page) -> None:
    ask(page, "发烧怎么办")
    expect(page.locator("#hits li[data-id]")).to_have_count(10)
    widths = [
        float(style.split("width:")[1].strip(" ;%"))
        for style in page.locator(".fill").evaluate_all("all => all.map(e => e.style.cssText)")
    ]
    assert widths == sorted(widths, reverse=True)
    assert widths[0] == 100
    assert 0 < widths[-1] < 50


def test_the_page_searches_an_index_of_three_documents(browser: Browser, tmp_path: Path) -> None:
    corpus = write_jsonl(tmp_path / "corpus.jsonl", make_records(3))
    folders = ["--indexes", str(tmp_path / "indexes"), "--builds", str(tmp_path / "builds")]
    assert main(["build", "--corpus", str(corpus), "--index", "tiny", *folders]) == 0
    with running_service(tmp_path / "indexes", "tiny") as service:
        page = browser.new_page()
        page.goto(service.url)
        ask(page, "发热")
        expect(page.locator("#hits li[data-id]")).to_have_count(3)
        page.close()


@contextmanager
def stripping_proxy(url: str, prefix: str) -> Iterator[str]:
    """A proxy that takes a prefix away, and knows nothing without it."""

    class Handler(BaseHTTPRequestHandler):
        def handle_any(self) -> None:
            if not self.path.startswith(f"{prefix}/"):
                self.send_error(404)
                return
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            kept = {"Content-Type": self.headers.get("Content-Type", "application/json")}
            answer = httpx2.request(
                self.command, url + self.path.removeprefix(prefix), content=body, headers=kept
            )
            self.send_response(answer.status_code)
            self.send_header("Content-Type", answer.headers["Content-Type"])
            self.end_headers()
            self.wfile.write(answer.content)

        do_GET = do_POST = handle_any  # noqa: N815

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}{prefix}/"
        server.shutdown()


def test_the_page_and_the_documents_work_under_a_prefix(browser: Browser, indexes: Path) -> None:
    with (
        running_service(indexes, "sample", ROOT_PATH="/care") as service,
        stripping_proxy(service.url, "/care") as address,
    ):
        page = browser.new_page()
        page.goto(address)
        ask(page, "发烧怎么办")
        expect(page.locator("#hits li[data-id]")).to_have_count(10)
        expect(page.locator("#index-info")).to_contain_text("sample")
        page.close()
        assert "/care/openapi.json" in httpx2.get(f"{address}docs").text
        # Probes ask the service itself, without the prefix.
        assert httpx2.get(f"{service.url}/health/ready").status_code == 200


def test_markup_in_a_question_is_not_run(page: Page) -> None:
    ask(page, "<img src=x onerror=\"document.title='run'\">")
    expect(page.locator("#hits li[data-id]")).to_have_count(10)
    assert page.title() != "run"


def test_the_page_fits_a_phone_and_keeps_the_question_out_of_the_address(page: Page) -> None:
    ask(page, "咳嗽一直不好")
    expect(page.locator("#hits li[data-id]")).to_have_count(10)
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert "咳嗽" not in page.evaluate("decodeURIComponent(location.href)")
    assert page.evaluate("localStorage.length + sessionStorage.length") == 0


def test_the_footer_names_the_index(page: Page) -> None:
    expect(page.locator("#index-info")).to_contain_text("sample")
    expect(page.locator("#index-info")).to_contain_text("care-mini")


def test_a_service_that_asks_for_a_key_gets_it_from_the_page(
    browser: Browser, indexes: Path
) -> None:
    keys = f"{ADMIN_KEY},{SEARCH_KEY}"
    with running_service(indexes, "sample", API_KEYS=keys) as service:
        page = browser.new_page(locale="zh-CN")
        page.goto(service.url)
        page.fill("#access-key", "wrong")
        page.press("#access-key", "Enter")
        ask(page, "血压高的人平时吃饭要注意什么")
        expect(page.locator("#error")).to_contain_text("没有使用此服务的权限")
        page.fill("#access-key", "asks")
        page.press("#access-key", "Enter")
        expect(page.locator("#hits li.hit")).to_have_count(10)
        expect(page.locator("#index-info")).to_contain_text("sample")
        assert page.evaluate("JSON.stringify([localStorage, sessionStorage])") == "[{},{}]"
        page.close()
