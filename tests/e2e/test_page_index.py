"""The search page in a browser: the index, its versions and documents, for administrators."""

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from core.service_process import running_service
from tests.conftest import ADMIN_KEY, SEARCH_KEY, make_records
from tests.e2e.browsing import ask, overflow, violations
from tests.e2e.services import build_index

pytestmark = [pytest.mark.e2e, pytest.mark.browser]

LISTED = "#index-body .documents li"


def test_the_index_can_be_looked_at_and_reloaded(page: Page) -> None:
    page.get_by_role("button", name="索引详情").click()
    facts = page.locator("#index-view .facts")
    expect(facts).to_contain_text("336")
    expect(facts).to_contain_text("使用中的版本")
    expect(facts).to_contain_text("department")
    page.get_by_role("button", name="查看各个版本").press("Enter")
    expect(page.locator("#index-body .versions li")).to_have_count(1)
    expect(page.locator("#index-body .versions li")).to_contain_text("336 文档")
    expect(page.get_by_role("button", name="查看各个版本")).to_be_focused()
    assert violations(page) == []
    with page.expect_response("**/index/reload"):
        page.get_by_role("button", name="载入使用中的版本").click()
    # Without keys, pages of this machine may do what administrators may.
    expect(page.locator("#index-body").get_by_role("status")).to_contain_text("已载入")
    assert overflow(page) == 0


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a service with keys; its index has 45 documents, of which one is split."""
    folder = tmp_path_factory.mktemp("guarded")
    records = make_records(44)
    long = "".join(f"高血压患者第{i}号的护理要点。" for i in range(40))
    records.append({"_id": "病历/1", "title": "护理", "text": long, "metadata": {"year": 2020}})
    chunks = ["--chunk-tokens", "40", "--chunk-overlap", "10"]
    indexes = build_index(folder, "ward", records, *chunks)
    keys = f"{ADMIN_KEY},{SEARCH_KEY}"
    with running_service(indexes, "ward", API_KEYS=keys) as service:
        yield service.url


def enter_key(page: Page, key: str) -> None:
    page.get_by_label("访问密钥").fill(key)
    page.keyboard.press("Enter")


def test_documents_are_listed_opened_and_found_by_keys(browser: Browser, guarded: str) -> None:
    page = browser.new_page(viewport={"width": 360, "height": 740}, locale="zh-CN")
    page.goto(guarded)
    enter_key(page, "asks")
    ask(page, "护理")
    page.get_by_role("button", name="索引详情").click()
    page.get_by_role("button", name="查看文档").press("Enter")
    alert = page.locator("#index-body .alert")
    expect(alert.locator("h3")).to_contain_text("此密钥不能用于这项操作")
    assert violations(page) == []
    enter_key(page, "secret")
    expect(page.locator("#index-more")).to_be_focused()

    listed = page.locator(LISTED)
    status = page.locator("#index-body .documents [role=status]")
    expect(listed).to_have_count(20)
    expect(status).to_have_text("第 1–20 篇，共 45 篇")
    expect(listed.first).to_contain_text(make_records(1)[0]["_id"])
    expect(page.get_by_role("button", name="上一页")).to_be_hidden()
    assert (overflow(page), violations(page)) == (0, [])
    after = page.get_by_role("button", name="下一页")
    after.press("Enter")
    expect(status).to_have_text("第 21–40 篇，共 45 篇")
    expect(after).to_be_focused()
    after.press("Enter")
    expect(listed).to_have_count(5)
    expect(listed.last).to_contain_text(re.compile("病历/1 · [0-9]+ 段"))
    expect(after).to_be_hidden()
    expect(status).to_be_focused()

    opened = listed.last.get_by_role("button")
    opened.press("Enter")
    expect(page.locator("#passage-title")).to_have_text("护理")
    texts = page.locator("#passage-body .text")
    expect(texts.first).to_contain_text("病历/1#0")
    assert texts.count() == int(re.findall("([0-9]+) 段", listed.last.inner_text())[0])
    expect(page.locator("#passage-body .facts")).to_contain_text("2020")
    assert (overflow(page), violations(page)) == (0, [])
    page.keyboard.press("Escape")
    expect(page.locator("#passage")).to_be_hidden()
    expect(opened).to_be_focused()

    page.get_by_role("button", name="上一页").press("Enter")
    expect(status).to_have_text("第 21–40 篇，共 45 篇")
    page.get_by_label("文档编号").fill("病历/1#1")
    page.keyboard.press("Enter")
    expect(page.locator("#passage-title")).to_have_text("护理")
    expect(texts).to_have_count(1)
    page.keyboard.press("Escape")
    page.get_by_label("文档编号").fill("unknown")
    page.keyboard.press("Enter")
    expect(page.locator("#passage-body .alert")).to_contain_text("索引中没有这个文档")
    page.close()
