"""The search page and the API page in a real browser."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import httpx2
import pytest
from playwright.sync_api import Browser, Page, expect

from core.service_process import running_service
from tests.conftest import make_records
from tests.e2e.browsing import answer_with_problem, ask, body_of, open_panel, unfold
from tests.e2e.services import build_index

pytestmark = [pytest.mark.e2e, pytest.mark.browser]

# Codes of the errors of a search, and their status.
ERRORS = {
    "invalid_json": 400,
    "unauthorized": 401,
    "forbidden": 403,
    "not_found": 404,
    "method_not_allowed": 405,
    "body_too_long": 413,
    "unsupported_media_type": 415,
    "invalid_request": 422,
    "empty_text": 422,
    "filter_not_numeric": 422,
    "text_too_long": 422,
    "unknown_filter_field": 422,
    "mode_not_available": 422,
    "rerank_not_available": 422,
    "rerank_too_large": 422,
    "overloaded": 429,
    "rate_limited": 429,
    "internal_error": 500,
    "shutting_down": 503,
    "too_many_requests": 503,
    "unavailable": 503,
    "deadline_exceeded": 504,
}


def test_a_search_shows_hits_first_and_scores_and_stage_times_to_developers(page: Page) -> None:
    ask(page, "血压高的人平时吃饭要注意什么")
    expect(page.locator(".hits li[data-id]")).to_have_count(10)
    first = page.locator(".hits li[data-id]").first
    expect(first).to_contain_text("血压")
    expect(page.locator("#status")).to_have_text("找到 10 条")
    expect(first.locator(".score")).to_be_hidden()
    expect(page.locator(".timings")).to_be_hidden()
    open_panel(page)
    page.get_by_role("switch", name="开发者信息").check()
    page.get_by_role("button", name="显示结果").click()
    expect(first.locator(".score")).to_contain_text(re.compile(r"0\.\d+"))
    expect(page.locator(".timings")).to_contain_text("编码")
    expect(page.locator("#status")).to_contain_text("毫秒")
    page.reload()
    expect(page.locator(".timings")).to_be_visible()  # the switch is remembered on the device


def test_the_mode_can_be_chosen_and_applies_at_once(page: Page) -> None:
    page.set_viewport_size({"width": 1280, "height": 800})
    page.get_by_role("switch", name="开发者信息").check()
    expect(page.locator("#mode option")).to_have_count(3)
    assert page.locator("#mode").input_value() == "hybrid"
    with page.expect_response("**/search") as first:
        ask(page, "血压高的人平时吃饭要注意什么")
    with page.expect_response("**/search") as second:
        page.select_option("#mode", "lexical")
    assert [each.value.json()["mode"] for each in (first, second)] == ["hybrid", "lexical"]
    expect(page.locator(".hits li[data-id]")).to_have_count(10)


def test_a_chosen_value_filters_the_hits(page: Page) -> None:
    ask(page, "发烧怎么办")
    expect(page.locator(".hits li[data-id]")).to_have_count(10)
    open_panel(page)
    unfold(page, "科室")
    page.get_by_role("checkbox", name="儿科", exact=True).check()
    expect(page.locator("summary", has_text="科室").locator(".filter-count")).to_have_text("1")
    page.get_by_role("button", name="显示结果").click()
    expect(page.locator("#open-filters")).to_have_text("筛选（1）")
    expect(page.locator(".hits li[data-id]:not(:has-text('儿科'))")).to_have_count(0)
    expect(page.locator(".hits li[data-id]:has-text('儿科')")).to_have_count(10)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a service of index 'fields', with values of all kinds, and of index 'tiny'."""
    folder = tmp_path_factory.mktemp("small")
    records = make_records(12)
    for i, record in enumerate(records):
        record["metadata"] |= {"year": 2020 + i % 3, "ward": f"{i % 2}"}
    build_index(folder, "fields", records)
    tiny = [one | {"_id": f"tiny-{i}"} for i, one in enumerate(make_records(3))]
    with running_service(build_index(folder, "tiny", tiny), "fields") as service:
        yield service.url


def test_values_of_every_filter_field_can_be_chosen(browser: Browser, small: str) -> None:
    """Text, whole numbers and booleans, which keep their types; fields without a Chinese name."""
    page = browser.new_page(viewport={"width": 1280, "height": 800}, locale="zh-CN")
    page.goto(small)
    ask(page, "发热")
    hits = page.locator(".hits li[data-id]")
    expect(hits).to_have_count(10)
    for field, value, count in (("rare", "true", 1), ("ward", '"0"', 6), ("tags", '"组1"', 3)):
        box = page.locator(f'input[data-field="{field}"]').and_(
            page.locator(f"input[data-value={json.dumps(value, ensure_ascii=False)}]")
        )
        if not box.is_visible():
            page.locator(f'details[data-field="{field}"] summary').click()
        box.check()
        expect(hits).to_have_count(count)
        page.locator("#clear-filters").click()
        expect(hits).to_have_count(10)
    page.locator('details[data-field="year"] summary').click()
    with page.expect_request("**/search") as sent:
        page.get_by_label("从", exact=True).fill("2022")
        page.keyboard.press("Enter")
    assert body_of(sent.value)["filter"] == {"year": {"gte": 2022}}
    expect(hits).to_have_count(4)
    with page.expect_request("**/search") as sent:
        page.get_by_label("到", exact=True).fill("2021")
        page.keyboard.press("Enter")
    assert body_of(sent.value)["filter"] == {"year": {"gte": 2022, "lte": 2021}}
    expect(hits).to_have_count(0)
    page.get_by_role("button", name="去掉筛选条件后再试。").click()
    expect(hits).to_have_count(10)
    assert page.get_by_label("从", exact=True).input_value() == ""
    page.close()


def test_an_error_is_shown_in_chinese_and_without_hits(page: Page) -> None:
    ask(page, "发烧怎么办")
    expect(page.locator(".hits li[data-id]")).to_have_count(10)
    ask(page, "长" * 2500)
    expect(page.locator("#error")).to_be_visible()
    expect(page.locator("#error")).to_contain_text("2000")
    expect(page.locator(".hits li")).to_have_count(0)
    expect(page.locator("#status")).to_be_empty()
    assert not re.search("[A-Za-z]", page.locator("#error").inner_text().partition("请求编号")[0])


def test_each_error_has_a_chinese_sentence(page: Page) -> None:
    error = page.locator("#error")
    for code, status in ERRORS.items():
        fault = {"field": "query", "code": code, "message": "English words"}
        problem = {"code": code, "title": "Title", "detail": "English words", "errors": [fault]}
        page.unroute_all()
        answer_with_problem(page, status, problem)
        ask(page, "发烧怎么办")
        expect(error).to_be_visible()
        assert not re.search("[A-Za-z]", error.inner_text()), code
        expect(error.get_by_role("button", name="重试")).to_have_count(int(status >= 429))


def test_an_unknown_error_is_shown_by_its_status(page: Page) -> None:
    error = page.locator("#error")
    for status, body in ((502, {"code": "new_code", "detail": "English"}), (504, "no JSON object")):
        page.unroute_all()
        answer_with_problem(page, status, body)
        ask(page, "发烧怎么办")
        expect(error).to_contain_text(str(status))
        expect(error).not_to_contain_text("English")


def test_an_empty_query_removes_the_old_hits(page: Page) -> None:
    ask(page, "发烧怎么办")
    expect(page.locator(".hits li[data-id]")).to_have_count(10)
    ask(page, " ")
    expect(page.locator("#query")).to_have_attribute("aria-invalid", "true")
    expect(page.locator(".hits li")).to_have_count(0)
    expect(page.locator(".timings")).to_have_count(0)


def test_score_bars_differ_within_one_response(page: Page) -> None:
    page.evaluate("localStorage.setItem('care.developer', 'on')")
    page.reload()
    ask(page, "发烧怎么办")
    expect(page.locator(".hits li[data-id]")).to_have_count(10)
    widths = [
        float(style.split("width:")[1].strip(" ;%"))
        for style in page.locator(".fill").evaluate_all("all => all.map(e => e.style.cssText)")
    ]
    assert widths == sorted(widths, reverse=True)
    assert widths[0] == 100
    assert 0 < widths[-1] < 50


@contextmanager
def stripping_proxy(url: str, prefix: str) -> Iterator[str]:
    """A proxy that strips a prefix and returns 404 without it."""

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

        do_GET = do_HEAD = do_POST = handle_any  # noqa: N815

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}{prefix}/"
        server.shutdown()


@pytest.fixture(scope="module")
def below_care(indexes: Path) -> Iterator[str]:
    """The address of a service whose page has the prefix `/care`."""
    with running_service(indexes, "sample", ROOT_PATH="/care") as service:
        yield service.url


@pytest.fixture(scope="module")
def prefixed(below_care: str) -> Iterator[str]:
    """The address of that service behind a proxy that strips the prefix."""
    with stripping_proxy(below_care, "/care") as address:
        yield address


def test_probes_need_no_prefix(below_care: str) -> None:
    assert httpx2.get(f"{below_care}/health/ready").status_code == 200
    assert httpx2.get(f"{below_care}/openapi.json").json()["servers"] == [{"url": "/care"}]


def test_the_page_works_under_a_prefix(browser: Browser, prefixed: str) -> None:
    page = browser.new_page()
    page.goto(prefixed)
    ask(page, "发烧怎么办")
    expect(page.locator(".hits li[data-id]")).to_have_count(10)
    expect(page.locator("#index-info")).to_contain_text("sample")
    page.locator("#docs-link").click()
    page.wait_for_url(f"{prefixed}docs")
    page.close()


@pytest.mark.parametrize("where", ["url", "prefixed"])
def test_the_api_page_sends_requests_and_loads_nothing_from_other_hosts(
    browser: Browser, where: str, request: pytest.FixtureRequest
) -> None:
    address = request.getfixturevalue(where).rstrip("/")
    page = browser.new_page()
    requests: list[str] = []
    faults: list[str] = []
    page.on("request", lambda sent: requests.append(sent.url))
    page.on("console", lambda message: faults.append(message.text))
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.goto(f"{address}/docs")
    search = page.locator("#operations-search-search_search_post")
    search.locator(".opblock-summary").click()
    search.get_by_role("button", name="Try it out").click()
    search.get_by_role("button", name="Execute").click()
    live = search.locator(".live-responses-table tbody .response-col_status")
    expect(live).to_contain_text("200")
    assert f"{address}/search" in requests
    assert [sent for sent in requests if not sent.startswith((f"{address}/", "data:"))] == []
    assert faults == []
    page.get_by_role("link", name="licences").click()
    expect(page.locator("body")).to_contain_text("Apache License")
    page.close()


def test_markup_in_a_query_is_not_rendered(page: Page) -> None:
    ask(page, "<img src=x onerror=\"document.title='run'\">")
    expect(page.locator(".hits li[data-id]")).to_have_count(10)
    assert page.title() != "run"


def test_the_page_fits_a_phone_names_its_index_and_keeps_the_query_out_of_the_url(
    page: Page,
) -> None:
    ask(page, "咳嗽一直不好")
    expect(page.locator(".hits li[data-id]")).to_have_count(10)
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert "咳嗽" not in page.evaluate("decodeURIComponent(location.href)")
    assert page.evaluate("localStorage.length + sessionStorage.length") == 0
    assert page.title() == "医学文本检索"
    expect(page.locator("#index-info")).to_contain_text("sample")
    expect(page.locator("#index-info")).to_contain_text("care-mini")


def test_the_page_asks_for_an_api_key(browser: Browser, closed_url: str) -> None:
    page = browser.new_page(locale="zh-CN")
    page.goto(closed_url)
    page.fill("#access-key", "wrong")
    page.press("#access-key", "Enter")
    ask(page, "血压高的人平时吃饭要注意什么")
    expect(page.locator("#error")).to_contain_text("没有使用此服务的权限")
    page.fill("#access-key", "asks")
    page.press("#access-key", "Enter")
    expect(page.locator(".hits li.hit")).to_have_count(10)
    expect(page.locator("#index-info")).to_contain_text("sample")
    assert page.evaluate("JSON.stringify([localStorage, sessionStorage])") == "[{},{}]"
    page.close()


def test_the_api_page_asks_for_an_api_key(browser: Browser, closed_url: str) -> None:
    page = browser.new_page()
    page.goto(f"{closed_url}/docs")
    expect(page.locator("#key-form")).to_be_visible()
    page.fill("#access-key", "asks")
    page.press("#access-key", "Enter")
    index = page.locator("#operations-search-index_index_get")
    index.locator(".opblock-summary").click()
    index.get_by_role("button", name="Try it out").click()
    index.get_by_role("button", name="Execute").click()
    live = index.locator(".live-responses-table tbody .response-col_status")
    expect(live).to_contain_text("200")
    expect(page.locator("#key-form")).to_be_hidden()
    assert page.evaluate("JSON.stringify([localStorage, sessionStorage])") == "[{},{}]"
    page.close()


def test_another_index_can_be_chosen_and_stays_chosen(browser: Browser, small: str) -> None:
    page = browser.new_page(locale="zh-CN", viewport={"width": 1280, "height": 800})
    page.goto(small)
    ask(page, "高血压患者的护理")
    hits = page.locator(".hits li[data-id]")
    expect(hits.first).to_have_attribute("data-id", re.compile("^d"))
    with page.expect_response("**/indexes/tiny/search"):
        page.get_by_label("索引", exact=True).select_option("tiny")
    expect(hits.first).to_have_attribute("data-id", re.compile("^tiny-"))
    expect(hits).to_have_count(3)
    expect(page.locator("#index-info")).to_contain_text("tiny")
    page.reload()
    expect(hits.first).to_have_attribute("data-id", re.compile("^tiny-"))
    page.get_by_role("button", name="复制链接").wait_for()
    page.get_by_label("索引", exact=True).select_option("fields")
    expect(hits.first).to_have_attribute("data-id", re.compile("^d"))
    page.close()
