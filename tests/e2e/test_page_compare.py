"""The search page in a browser: two modes side by side, reranking, links to searches, access."""

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from itertools import pairwise
from pathlib import Path
from urllib.parse import parse_qs, quote, urlencode, urlsplit

import pytest
from playwright.sync_api import Browser, Page, Request, expect

from core.service_process import running_service
from tests.curation.endpoints import Body, send_json
from tests.e2e.browsing import (
    QUESTION,
    answer_with_problem,
    ask,
    body_of,
    faint_texts,
    heading_levels,
    open_panel,
    overflow,
    unfold,
    violations,
)
from tests.service.test_rerank import by_length, reranker

pytestmark = [pytest.mark.e2e, pytest.mark.browser]

OVERLOADED = {"code": "overloaded", "title": "Title", "detail": "English words"}


@pytest.fixture
def page(page: Page) -> Page:
    """The page in a wide window, with the details for developers."""
    page.set_viewport_size({"width": 1280, "height": 800})
    show_developer(page)
    return page


def show_developer(page: Page) -> None:
    page.get_by_role("switch", name="开发者信息").check()
    expect(page.locator("#modes")).to_be_visible()


def compare(page: Page, mode: str = "lexical") -> None:
    """Asks the question in the default mode and another one."""
    page.select_option("#compare", mode)
    ask(page, QUESTION)
    expect(page.locator(".column")).to_have_count(2)


@contextmanager
def searches(page: Page) -> Iterator[list[Request]]:
    """The searches that the page sends."""
    sent: list[Request] = []

    def note(request: Request) -> None:
        if urlsplit(request.url).path == "/search":
            sent.append(request)

    page.on("request", note)
    yield sent
    page.remove_listener("request", note)


def test_two_modes_stand_side_by_side_with_the_rank_in_the_other(page: Page) -> None:
    with searches(page) as sent:
        compare(page)
    assert [body_of(each)["mode"] for each in sent] == ["hybrid", "lexical"]
    found = [[hit["id"] for hit in each.response().json()["hits"]] for each in sent]  # type: ignore[union-attr]
    names = page.locator(".column > h3").all_text_contents()
    assert names == ["意思和字词", "字词"]
    for at, column in enumerate(page.locator(".column").all()):
        own, other = found[at], found[1 - at]
        places = [
            f"「{names[1 - at]}」{f'第 {other.index(id_) + 1}' if id_ in other else '未出现'}"
            for id_ in own
        ]
        assert column.locator(".place").all_text_contents() == places
        expect(column.locator(".column-status")).to_contain_text(f"找到 {len(own)} 条")
    common = len(set(found[0]) & set(found[1]))
    assert 0 < common < 10  # so that both kinds of places are on the page
    status = f"「意思和字词」找到 10 条，「字词」找到 10 条，两边都有 {common} 条。"
    expect(page.locator("#status")).to_have_text(status)
    left, right = (each.bounding_box() for each in page.locator(".column").all())
    assert left is not None
    assert right is not None
    assert left["y"] == right["y"]
    assert left["x"] + left["width"] < right["x"]


def test_columns_follow_each_other_on_a_phone(page: Page) -> None:
    compare(page)
    page.set_viewport_size({"width": 360, "height": 740})
    first, second = (each.bounding_box() for each in page.locator(".column").all())
    assert first is not None
    assert second is not None
    assert first["x"] == second["x"]
    assert first["y"] + first["height"] < second["y"]


def test_the_page_without_comparison_has_one_column_and_no_places(page: Page) -> None:
    compare(page)
    page.select_option("#compare", "")
    expect(page.locator(".column")).to_have_count(1)
    expect(page.locator(".hits li[data-id]")).to_have_count(10)
    expect(page.locator(".place, .column > h3, .column-status")).to_have_count(0)
    assert heading_levels(page)[:4] == [1, 2, 2, 3]


def test_a_mode_is_not_compared_with_itself(page: Page) -> None:
    page.select_option("#compare", "lexical")
    page.select_option("#mode", "lexical")
    assert page.locator("#compare").input_value() == ""
    assert page.locator("#compare option").all_text_contents() == ["不对比", "意思和字词", "意思"]


def test_an_error_of_one_column_leaves_the_answer_of_the_other(page: Page) -> None:
    answer_with_problem(page, 429, OVERLOADED, mode="lexical")
    compare(page)
    good, bad = page.locator(".column").all()
    expect(good.locator(".hits li[data-id]")).to_have_count(10)
    expect(good.locator(".place")).to_have_count(0)
    expect(bad.locator("h4")).to_have_text("服务繁忙，请稍后再试。")
    expect(page.locator("#status")).to_have_text("「意思和字词」找到 10 条，「字词」没有完成。")
    expect(page.locator("#error")).to_be_hidden()
    page.unroute("**/search")
    bad.get_by_role("button", name="重试").click()
    expect(page.locator(".hits li[data-id]")).to_have_count(20)


def test_an_error_of_both_columns_is_shown_once(page: Page) -> None:
    answer_with_problem(page, 429, OVERLOADED)
    page.select_option("#compare", "lexical")
    ask(page, QUESTION)
    expect(page.locator("#error h2")).to_have_text("服务繁忙，请稍后再试。")
    expect(page.locator(".column")).to_have_count(0)


def test_the_status_announces_both_columns_once(page: Page) -> None:
    page.evaluate(
        """() => {
          window.announced = [];
          const status = document.getElementById("status");
          new MutationObserver(() => announced.push(status.textContent)).observe(
            status, { childList: true, characterData: true, subtree: true });
        }"""
    )
    compare(page)
    announced = page.evaluate("announced.filter(text => text && text !== '正在检索…')")
    assert announced == [page.locator("#status").text_content()]
    assert page.locator(".column [aria-live], .column [role=status]").count() == 0


def test_reranking_is_offered_only_where_the_index_can(page: Page) -> None:
    expect(page.locator("#rerank")).to_be_hidden()
    with searches(page) as sent:
        ask(page, QUESTION)
        expect(page.locator(".hits li[data-id]")).to_have_count(10)
    assert "rerank" not in body_of(sent[0])


def test_hits_are_ranked_again_if_the_reader_wants_and_the_server_can(
    browser: Browser, indexes: Path
) -> None:
    statuses = [200]

    def respond(body: Body, handler: BaseHTTPRequestHandler) -> None:
        send_json(handler, statuses[-1], by_length(body))

    with (
        reranker(respond) as (server, bodies),
        running_service(indexes, "sample", RERANK_URL=server) as service,
    ):
        page = browser.new_page(locale="zh-CN")
        page.goto(service.url)
        show_developer(page)
        page.get_by_label("重新排序").check()
        with page.expect_response("**/search") as answered:
            ask(page, QUESTION)
        assert answered.value.json()["reranked"] is True
        expect(page.locator(".hits li[data-id]")).to_have_count(10)
        status = page.locator("#status")
        expect(status).not_to_contain_text("重新排序没有完成")
        with page.expect_response("**/search") as answered:
            page.get_by_label("重新排序").uncheck()
        assert answered.value.json()["reranked"] is False
        expect(status).not_to_contain_text("重新排序没有完成")
        assert len(bodies) == 1

        statuses.append(500)
        page.get_by_label("重新排序").check()
        ask(page, "发热")
        expect(status).to_contain_text("重新排序没有完成，保持原来的顺序")
        expect(status).not_to_contain_text("部分查找方式")
        page.close()


def copied_link(page: Page) -> str:
    """Presses the button and returns the link in the clipboard."""
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="复制链接").click()
    expect(page.locator("#copied")).to_contain_text("链接已复制。")
    link: str = page.evaluate("navigator.clipboard.readText()")
    return link


def test_a_link_leads_to_the_same_search_and_no_address_has_it(
    browser: Browser, page: Page, url: str
) -> None:
    visited = page.evaluate("history.length")
    page.select_option("#mode", "dense")
    page.select_option("#compare", "lexical")
    unfold(page, "科室")
    page.get_by_role("checkbox", name="儿科", exact=True).check()
    ask(page, "孩子发烧 & 咳嗽#1 怎么办")
    expect(page.locator(".column")).to_have_count(2)
    link = copied_link(page)
    assert page.url == f"{url}/"
    assert page.evaluate("history.length") == visited
    assert parse_qs(urlsplit(link).fragment) == {
        "q": ["孩子发烧 & 咳嗽#1 怎么办"],
        "mode": ["dense"],
        "compare": ["lexical"],
        "filter": ['{"department":["儿科"]}'],
    }
    assert urlsplit(link)._replace(fragment="").geturl() == f"{url}/"

    reader = browser.new_page(locale="zh-CN")
    sent: list[Request] = []
    reader.on("request", lambda request: sent.append(request))
    reader.goto(link)
    expect(reader.locator(".column")).to_have_count(2)
    assert reader.locator("#query").input_value() == "孩子发烧 & 咳嗽#1 怎么办"
    assert reader.locator("#mode").input_value() == "dense"
    assert reader.locator("#compare").input_value() == "lexical"
    checked = reader.locator("#filter-groups input:checked")
    assert checked.evaluate_all("all => all.map(e => e.dataset.value)") == ['"儿科"']
    assert ids(reader) == ids(page)
    bodies = [body_of(each) for each in sent if each.method == "POST"]
    assert [body["mode"] for body in bodies] == ["dense", "lexical"]
    assert all(body["filter"] == {"department": ["儿科"]} for body in bodies)
    assert reader.url == f"{url}/"
    for request in sent:
        assert "referer" not in request.all_headers()
        if request.is_navigation_request():
            continue  # Playwright names its fragment, which browsers do not send
        assert urlsplit(request.url).fragment == urlsplit(request.url).query == ""
    assert reader.evaluate("localStorage.length + sessionStorage.length") == 0
    reader.close()


def ids(page: Page) -> list[str]:
    found: list[str] = page.locator(".hits li[data-id]").evaluate_all(
        "all => all.map(e => e.dataset.id)"
    )
    return found


def test_a_link_that_is_opened_in_the_open_page_searches_too(page: Page, url: str) -> None:
    ask(page, QUESTION)
    expect(page.locator(".hits li[data-id]")).to_have_count(10)
    with page.expect_response("**/search") as answered:
        page.evaluate(
            "hash => { location.hash = hash; }", urlencode({"q": "发热", "mode": "dense"})
        )
    assert body_of(answered.value.request)["query"] == "发热"
    assert answered.value.json()["mode"] == "dense"
    assert page.url == f"{url}/"


def test_a_link_keeps_its_options_until_the_key_is_entered(
    browser: Browser, closed_url: str
) -> None:
    page = browser.new_page(locale="zh-CN")
    fields = {"q": "发热", "mode": "lexical", "filter": '{"department": ["儿科"]}'}
    page.goto(f"{closed_url}/#{urlencode(fields)}")
    page.fill("#access-key", "asks")
    with page.expect_response("**/search") as answered:
        page.press("#access-key", "Enter")
    body = body_of(answered.value.request)
    assert (body["mode"], body["filter"]) == ("lexical", {"department": ["儿科"]})
    expect(page.locator(".hits li[data-id]").first).to_be_visible()
    page.close()


@pytest.mark.parametrize(
    "fields",
    [
        {"mode": "unknown", "compare": "constructor", "rerank": "1", "filter": "{"},
        {"mode": "hybrid", "compare": "hybrid", "filter": '["department"]'},
        {"filter": '{"department": "儿科", "nothing": ["x"], "topic": ["无此主题", null]}'},
        {"mode": "", "rerank": "yes", "filter": '{"__proto__": ["a"]}', "other": "x"},
    ],
)
def test_wrong_values_of_a_link_are_ignored(
    browser: Browser, url: str, fields: dict[str, str]
) -> None:
    page = browser.new_page(locale="zh-CN")
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    with page.expect_response("**/search") as answered:
        page.goto(f"{url}/#{urlencode({'q': '发热'} | fields)}")
    assert answered.value.status == 200
    body = body_of(answered.value.request)
    assert (body["query"], body["mode"]) == ("发热", "hybrid")
    assert not {"filter", "rerank"} & body.keys()
    expect(page.locator(".column")).to_have_count(1)
    assert page.url == f"{url}/"
    assert faults == []
    page.close()


@pytest.mark.parametrize("fragment", ["q=%20", quote("发热"), "mode=dense"])
def test_a_fragment_without_a_question_searches_nothing(
    browser: Browser, url: str, fragment: str
) -> None:
    page = browser.new_page(locale="zh-CN")
    with searches(page) as sent:
        page.goto(f"{url}/#{fragment}")
        expect(page.locator("#index-info")).to_contain_text("sample")
        expect(page.locator("#examples")).to_be_visible()
    assert sent == []
    assert page.url == f"{url}/"
    page.close()


def test_without_a_clipboard_the_link_is_shown_and_selected(page: Page) -> None:
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    ask(page, QUESTION)
    page.get_by_role("button", name="复制链接").click()
    field = page.get_by_label("无法自动复制")
    expect(field).to_be_focused()
    assert parse_qs(urlsplit(field.input_value()).fragment)["q"] == [QUESTION]
    assert page.evaluate("getSelection().toString()") == field.input_value()
    ask(page, "发热")
    expect(field).to_be_hidden()
    assert field.input_value() == ""


def test_all_can_be_done_by_keyboard(page: Page) -> None:
    page.reload()
    expect(page.locator("#modes")).to_be_visible()
    expect(page.locator("#query")).to_be_focused()
    page.keyboard.type(QUESTION)
    page.keyboard.press("Enter")
    expect(page.locator(".hits li[data-id]")).to_have_count(10)
    for selector in ("#query", "#clear", "#submit", "summary >> nth=0"):
        expect(page.locator(selector)).to_be_focused()
        assert page.locator(selector).evaluate("e => getComputedStyle(e).outlineStyle") == "solid"
        page.keyboard.press("Tab")
    reached = []
    for _ in range(40):
        reached.append(page.evaluate("document.activeElement.id"))
        if reached[-1] == "copy-link":
            break
        if reached[-1] == "compare":
            page.keyboard.press("ArrowDown")
            expect(page.locator(".column")).to_have_count(2)
        page.keyboard.press("Tab")
    assert [id_ for id_ in reached if id_] == ["developer", "mode", "compare", "copy-link"]


@pytest.mark.parametrize(("scheme", "width"), [("light", 360), ("dark", 1280)])
def test_one_and_two_columns_fit_and_can_be_read(
    browser: Browser, url: str, scheme: str, width: int
) -> None:
    context = browser.new_context(
        viewport={"width": width, "height": 800},
        color_scheme=scheme,  # type: ignore[arg-type]
        locale="zh-CN",
    )
    page = context.new_page()
    requests: list[str] = []
    faults: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda message: faults.append(message.text))
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.goto(url)
    assert (overflow(page), faint_texts(page), violations(page)) == (0, [], [])
    ask(page, QUESTION)
    expect(page.locator(".hits li[data-id]")).to_have_count(10)
    assert (overflow(page), faint_texts(page), violations(page)) == (0, [], [])
    open_panel(page)
    show_developer(page)
    assert (overflow(page), faint_texts(page), violations(page)) == (0, [], [])
    page.select_option("#compare", "lexical")
    if width == 360:
        page.get_by_role("button", name="显示结果").click()
    expect(page.locator(".hits li[data-id]")).to_have_count(20)
    levels = heading_levels(page)
    assert (overflow(page), faint_texts(page), violations(page)) == (0, [], [])
    assert levels[-2:] == [4, 4]
    assert all(later <= earlier + 1 for earlier, later in pairwise(levels))
    assert faults == []  # a violated policy is one
    answer_with_problem(page, 429, OVERLOADED, mode="lexical")
    page.press("#query", "Enter")
    expect(page.locator(".column .alert")).to_be_visible()
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    page.click("#copy-link")
    expect(page.locator("#link")).to_be_visible()
    assert (overflow(page), faint_texts(page)) == (0, [])
    assert [sent for sent in requests if not sent.startswith((f"{url}/", "data:"))] == []
    context.close()


def test_controls_have_names_and_ids_are_unique(page: Page) -> None:
    compare(page)
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll("button, input, select")]
          .filter(e => !(e.labels?.length || e.textContent.trim() || e.ariaLabel)).map(e => e.id)"""
    )
    assert unnamed == []
    named = page.locator("[id]").evaluate_all("all => all.map(e => e.id)")
    assert len(named) == len(set(named))


def test_nothing_moves_for_readers_who_want_less_motion(browser: Browser, url: str) -> None:
    context = browser.new_context(reduced_motion="reduce", locale="zh-CN")
    page = context.new_page()
    page.goto(url)
    page.evaluate("document.body.classList.add('is-loading')")
    moving = page.evaluate(
        "document.getAnimations().map(a => a.animationName).filter(name => name !== 'pulse')"
    )
    assert moving == []
    context.close()
