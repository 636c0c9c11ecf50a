"""The search page in a browser: filters, hits, documents, the history and the two languages."""

import json
import re
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.e2e.browsing import (
    QUESTION,
    answer_with_hits,
    answer_with_problem,
    ask,
    body_of,
    change_index,
    open_panel,
    overflow,
    unfold,
    violations,
)

pytestmark = [pytest.mark.e2e, pytest.mark.browser]

HITS = ".hits li[data-id]"
HAN = re.compile(r"[\u4e00-\u9fff]")
DEPARTMENTS = [
    *(f"{name}科" for name in ("内", "外", "妇", "儿", "骨", "眼", "皮肤", "口腔", "中医")),
    *(f"内{i}科" for i in range(1, 37)),
]

# What a reader sees that is neither a document nor a question.
_WORDS_OF_PAGE = """() => {
  const words = [];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const node = texts.currentNode.parentElement;
    const data = "[lang='zh-CN']:not(html), .tags, #filter-groups, noscript, script";
    const shown = !node.closest(data);
    if (shown) words.push(texts.currentNode.data);
  }
  for (const node of document.querySelectorAll("[aria-label], [placeholder]")) {
    words.push(node.ariaLabel ?? "");
  }
  return words.join(" ");
}"""


def with_rich_metadata(index: dict[str, Any]) -> None:
    """As of a corpus of articles with the fields that most have."""
    index["documents"] = 5000
    index["filters"] = {
        "date": ["2024-03-01", "2024-01-05", "2024-02-07"],
        "department": DEPARTMENTS,
        "doi": [f"10.1000/care.{i}" for i in range(100)],
        "page": [10, 9, 1, 100],
        "reviewed": [False, True],
        "source": ["one"],
        "title_en": [f"A long English title of a document, number {i}" for i in range(30)],
        "url": [f"https://example.org/{i}" for i in range(100)],
        "year": [2021, 2020],
    }


def test_the_first_hit_stands_near_the_top_however_many_fields_there_are(page: Page) -> None:
    change_index(page, with_rich_metadata)
    page.reload()
    ask(page, QUESTION)
    for width, height in ((1280, 800), (390, 844), (360, 740), (1920, 1080)):
        expect(page.locator(HITS)).to_have_count(10)
        page.set_viewport_size({"width": width, "height": height})
        page.reload()  # the page asks the same question again
        expect(page.locator(HITS)).to_have_count(10)
        box = page.locator(HITS).first.bounding_box()
        assert box is not None
        assert box["y"] < 220, width
        assert box["y"] + box["height"] < height, width
    assert (overflow(page), violations(page)) == (0, [])


def test_fields_are_lists_ranges_and_switches_and_unique_ones_are_hidden(page: Page) -> None:
    page.set_viewport_size({"width": 1280, "height": 800})
    change_index(page, with_rich_metadata)
    page.reload()
    fields = page.locator("#filter-groups > *")
    names = ["科室", "页码", "年份", "日期", "reviewed"]
    expect(fields).to_have_count(len(names))
    for field, name in zip(fields.all(), names, strict=True):
        expect(field).to_contain_text(name)
    expect(page.locator(".choice").first).to_be_hidden()  # folded

    fields.nth(0).locator("summary").click()
    shown = page.locator(".choice:visible")
    listed = shown.locator("span:not(.choice-count)")
    numbered = [name for name in listed.all_text_contents() if name[1].isdigit()]
    assert numbered == [f"内{i}科" for i in range(1, 37)]
    page.get_by_label("查找选项").fill("内3")
    assert listed.all_text_contents() == ["内3科", *(f"内{i}科" for i in range(30, 37))]

    ask(page, QUESTION)
    expect(page.locator(HITS)).to_have_count(10)
    answer_with_hits(page, [{"title": "一"}])
    with page.expect_request("**/search") as sent:
        page.get_by_role("switch", name="reviewed").check()
    assert body_of(sent.value)["filter"] == {"reviewed": [True]}
    fields.nth(3).locator("summary").click()
    with page.expect_request("**/search") as sent:
        fields.nth(3).get_by_label("从", exact=True).fill("2024-02-01")
    expected = {"date": ["2024-02-07", "2024-03-01"], "reviewed": [True]}
    assert body_of(sent.value)["filter"] == expected


def test_the_question_box_grows_and_counts_and_enter_searches(page: Page) -> None:
    box = page.locator("#query")
    low = box.bounding_box()
    page.keyboard.type("一天")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("两次")
    assert box.input_value() == "一天\n两次"
    expect(page.locator(".hits")).to_have_count(0)
    high = box.bounding_box()
    assert low is not None
    assert high is not None
    assert high["height"] > low["height"]
    expect(page.locator("#counter")).to_be_hidden()
    box.fill("长" * 1990)
    expect(page.locator("#counter")).to_have_text("还可以输入 10 个字")
    box.fill("长" * 2003)
    expect(page.locator("#counter")).to_have_text("超出 3 个字")
    box.fill(QUESTION)
    page.keyboard.press("Enter")
    expect(page.locator(HITS)).to_have_count(10)
    page.get_by_role("button", name="清除问题和结果").click()
    expect(page.locator(HITS)).to_have_count(0)
    expect(page.locator("#examples")).to_be_visible()
    expect(box).to_be_focused()


def test_titles_lead_to_addresses_of_the_web_only(page: Page) -> None:
    addresses = ["https://example.org/a?b=1", "javascript:alert(1)", "/docs", "data:text/html,x", 5]
    answer_with_hits(page, [{"title": f"标题{a}", "metadata": {"url": a}} for a in addresses])
    ask(page, QUESTION)
    expect(page.locator(HITS)).to_have_count(5)
    link = page.locator(f"{HITS} a")
    expect(link).to_have_count(1)
    expect(link).to_have_attribute("href", "https://example.org/a?b=1")
    expect(link).to_have_attribute("rel", "noopener noreferrer")
    expect(link).to_have_attribute("target", "_blank")


def test_an_untitled_hit_does_not_repeat_its_text(page: Page) -> None:
    hit = {"text": "咖啡因会使血压升高。", "metadata": {"url": "http://example.org/x"}}
    answer_with_hits(page, [hit])
    ask(page, "咖啡")
    item = page.locator(HITS)
    expect(item.get_by_text("咖啡因会使血压升高。")).to_have_count(1)
    assert item.inner_text().count("咖啡因") == 1
    expect(item.get_by_role("link", name="example.org")).to_be_visible()


def test_words_of_the_question_are_marked_and_texts_stay_whole(page: Page) -> None:
    with page.expect_response("**/search") as answered:
        ask(page, "高血压患者应该怎么吃 Ca")
    expect(page.locator(HITS)).to_have_count(10)
    for item, hit in zip(page.locator(HITS).all(), answered.value.json()["hits"], strict=True):
        assert item.locator(".text").text_content() == hit["text"]
        assert item.locator("h3").text_content() == hit["title"]
    marks = set(page.locator(f"{HITS} mark").all_text_contents())
    assert "高血压" in marks
    assert marks <= {"高血压", "血压", "Ca", "CA", "高血"}


def test_a_sentence_is_pointed_out_only_if_it_is_certain(page: Page) -> None:
    sentence = "儿童发热时用退热药。"
    # The last one is the whole text.
    for others, certain, shown in (
        ("𠮷多喝水。", True, True),
        ("𠮷多喝水。", False, False),
        ("", True, False),
    ):
        text = f"{others}{sentence}"
        evidence = {"start": len(others), "end": len(text), "text": sentence, "certain": certain}
        page.unroute_all()
        answer_with_hits(page, [{"text": text, "evidence": evidence}])
        with page.expect_response("**/search"):
            ask(page, f"儿童发热吃退热药吗{certain}")
        expect(page.locator(".hits .text")).to_have_text(text)
        expect(page.locator(".evidence")).to_have_text([sentence] if shown else [])


def test_a_citation_names_the_source(page: Page) -> None:
    metadata = {
        "source": "医学杂志",
        "year": 2021,
        "page": 7,
        "doi": "https://doi.org/10.1000/x",
        "url": "https://example.org/x",
    }
    answer_with_hits(page, [{"id": "a#1", "title": "标题", "text": "正文。", "metadata": metadata}])
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    ask(page, QUESTION)
    page.get_by_role("button", name="复制引用").click()
    expect(page.locator(f"{HITS} .cite")).to_contain_text("引用已复制。")
    assert page.evaluate("navigator.clipboard.readText()") == (
        "正文。\n—— 标题，医学杂志，2021，第 7 页，doi:10.1000/x，https://example.org/x，"
        "编号 a#1，索引 sample v1"
    )
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    page.get_by_role("button", name="复制引用").click()
    assert page.locator(".copy-box").input_value().startswith("正文。\n—— 标题")


def test_more_results_follow_and_the_first_new_one_has_the_focus(page: Page) -> None:
    ask(page, QUESTION)
    expect(page.locator(HITS)).to_have_count(10)
    expect(page.locator("#answer")).to_be_hidden()  # without a language model
    first = page.locator(HITS).first.get_attribute("data-id")
    with page.expect_request("**/search") as sent:
        page.get_by_role("button", name="更多结果").click()
    assert body_of(sent.value)["top_k"] == 20
    expect(page.locator(HITS)).to_have_count(20)
    assert page.locator(HITS).first.get_attribute("data-id") == first
    expect(page.locator(HITS).nth(10)).to_be_focused()
    answer_with_problem(page, 422, {"code": "top_k_too_large", "errors": []})
    page.get_by_role("button", name="更多结果").click()
    expect(page.get_by_role("button", name="更多结果")).to_have_count(0)
    expect(page.locator(HITS)).to_have_count(20)
    expect(page.locator("#error")).to_be_hidden()


def test_hits_are_reached_and_opened_by_keys(page: Page) -> None:
    page.keyboard.press("Tab")
    ask(page, QUESTION)
    expect(page.locator(HITS)).to_have_count(10)
    page.keyboard.type("jk/")  # in the box they are letters
    assert page.locator("#query").input_value() == f"{QUESTION}jk/"
    page.fill("#query", QUESTION)
    page.locator("#skip").focus()
    page.keyboard.press("Enter")
    expect(page.locator(HITS).nth(0)).to_be_focused()
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("k")
    expect(page.locator(HITS).nth(1)).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#passage")).to_be_visible()
    title = page.locator(HITS).nth(1).locator("h3").inner_text()
    expect(page.locator("#passage-title")).to_have_text(title)
    expect(page.locator("#passage-body .text")).to_be_visible()
    assert violations(page) == []
    page.keyboard.press("Escape")
    expect(page.locator("#passage")).to_be_hidden()
    expect(page.locator(HITS).nth(1)).to_be_focused()
    page.keyboard.press("/")
    expect(page.locator("#query")).to_be_focused()


def test_a_passage_is_shown_with_its_neighbours(page: Page) -> None:
    answer_with_hits(
        page,
        [
            {
                "id": "a/b#2",
                "title": "标题",
                "text": "第2段",
                "parent": "a/b",
                "chunk": 2,
                "chunks": 6,
            }
        ],
    )
    asked: list[str] = []
    passages = [{"id": f"a/b#{i}", "chunk": i, "text": f"第{i}段"} for i in range(6)]
    document = {"id": "a/b", "text": None, "metadata": {"url": "http://example.org/d", "n": [1, 2]}}

    def respond(route: Any) -> None:
        asked.append(route.request.url)
        route.fulfill(json=document | {"passages": passages})

    page.route("**/documents/**", respond)
    ask(page, QUESTION)
    expect(page.locator(HITS)).to_contain_text("第 3 段，共 6 段")
    page.get_by_role("button", name="查看全文").click()
    texts = page.locator("#passage-body .text")
    expect(texts).to_have_count(3)
    assert asked[0].endswith("/documents/a%2Fb")
    expect(page.locator("#passage-body .found")).to_contain_text("第2段")
    expect(page.locator("#passage-body .facts")).to_contain_text("1，2")
    page.get_by_role("button", name="显示全部 6 段").click()
    expect(texts).to_have_count(6)
    page.get_by_role("button", name="关闭").click()
    expect(page.locator("#passage")).to_be_hidden()


def test_a_document_that_is_gone_is_said_in_the_dialog(page: Page) -> None:
    problem = {"code": "unknown_document", "errors": []}
    page.route("**/documents/**", lambda route: route.fulfill(status=404, json=problem))
    ask(page, QUESTION)
    page.get_by_role("button", name="查看全文").first.click()
    expect(page.locator("#passage-body h3")).to_have_text(
        "索引中没有这个文档：编号不对，或索引已更新。"
    )
    expect(page.locator(HITS)).to_have_count(10)


def test_going_back_and_reloading_keep_the_question_on_this_device(page: Page, url: str) -> None:
    ask(page, "发烧怎么办")
    expect(page.locator(HITS)).to_have_count(10)
    open_panel(page)
    unfold(page, "科室")
    page.get_by_role("checkbox", name="儿科", exact=True).check()
    page.get_by_role("button", name="显示结果").click()
    with page.expect_response("**/search"):
        ask(page, QUESTION)
    with page.expect_request("**/search") as sent:
        page.go_back()
    assert body_of(sent.value)["query"] == "发烧怎么办"
    assert body_of(sent.value)["filter"] == {"department": ["儿科"]}
    assert page.locator("#query").input_value() == "发烧怎么办"
    with page.expect_request("**/search") as sent:
        page.reload()
    assert body_of(sent.value)["query"] == "发烧怎么办"
    assert body_of(sent.value)["filter"] == {"department": ["儿科"]}
    expect(page.locator(HITS)).to_have_count(10)
    assert page.url == f"{url}/"
    assert page.title() == "医学文本检索"
    assert page.evaluate("localStorage.length + sessionStorage.length") == 0
    page.get_by_role("button", name="清除问题和结果").click()
    page.reload()
    expect(page.locator("#examples")).to_be_visible()
    assert page.locator("#query").input_value() == ""


def test_the_page_is_in_english_where_the_reader_wants_it(browser: Browser, url: str) -> None:
    context = browser.new_context(locale="en-GB", viewport={"width": 1280, "height": 800})
    page = context.new_page()
    page.goto(url)
    expect(page.locator("html")).to_have_attribute("lang", "en")
    expect(page).to_have_title("Medical text search")
    page.get_by_role("switch", name="Developer details").check()
    page.locator(".example").first.click()
    expect(page.locator(HITS)).to_have_count(10)
    expect(page.locator("#status")).to_contain_text("10 results")
    words = page.evaluate(_WORDS_OF_PAGE)
    assert HAN.findall(words.replace("中文", "")) == []
    assert violations(page) == []
    answer_with_problem(page, 429, {"code": "overloaded", "detail": "wörds"})
    ask(page, QUESTION)
    expect(page.locator("#error h2")).to_have_text("The service is busy: try again later.")
    expect(page.locator("#error")).not_to_contain_text("wörds")
    page.unroute("**/search")
    page.get_by_role("button", name="Try again").click()
    expect(page.locator(HITS)).to_have_count(10)

    page.get_by_role("button", name="中文").click()
    expect(page.locator("html")).to_have_attribute("lang", "zh-CN")
    expect(page.locator("#status")).to_contain_text("找到 10 条")
    expect(page.locator(HITS)).to_have_count(10)
    page.reload()
    expect(page).to_have_title("医学文本检索")
    expect(page.locator(HITS)).to_have_count(10)
    kept = page.evaluate("Object.entries(localStorage).flat().sort()")
    assert kept == sorted(["care.developer", "on", "care.language", "zh-CN"])
    context.close()


def test_both_languages_have_all_words(page: Page) -> None:
    missing = page.evaluate(
        """async () => {
          const { t, hasWords } = await import("./page/language.js");
          const source = await Promise.all(
            ["search", "results", "hits", "filters", "problems", "passage", "index_view", "options",
             "citing", "share", "api", "answer", "documents_view",
            ].map(async (n) => (await fetch(`page/${n}.js`)).text()));
          const html = await (await fetch("")).text();
          const keys = [...source.join("").matchAll(/\\bt\\(\\s*"([^"]+)"/g), ...html.matchAll(
            /data-(?:text|label|placeholder)="([^"]+)"/g)].map((match) => match[1]);
          return { used: keys.length, unknown: keys.filter((key) => !hasWords(key)) };
        }"""
    )
    assert missing["used"] > 60
    assert missing["unknown"] == []


def test_no_hits_and_an_unanswered_question_say_what_to_try(page: Page) -> None:
    change_index(page, lambda index: index.update(answerable_thresholds={"hybrid": 0.2}))
    page.reload()
    answer_with_hits(page, [{"text": "红烧肉"}], answerable=0.1)
    ask(page, "红烧肉怎么做")
    expect(page.locator("#status")).to_contain_text("似乎没有这个问题的答案")
    expect(page.locator(".advice")).to_contain_text("换一种说法")
    expect(page.locator(HITS)).to_have_count(1)
    page.unroute("**/search")
    answer_with_hits(page, [])
    ask(page, "红烧肉")
    expect(page.locator("#status")).to_have_text("没有符合条件的结果")
    expect(page.locator(".advice")).to_contain_text("换一种说法")
    expect(page.locator(".advice button")).to_have_count(0)


def test_a_search_by_words_without_hits_offers_to_search_by_meaning(page: Page) -> None:
    page.set_viewport_size({"width": 1280, "height": 800})
    page.get_by_role("switch", name="开发者信息").check()
    page.select_option("#mode", "lexical")
    ask(page, "qwertz")
    expect(page.locator(".advice")).to_be_visible()
    with page.expect_request("**/search") as sent:
        page.get_by_role("button", name="也按意思查找。").click()
    assert body_of(sent.value)["mode"] == "hybrid"
    expect(page.locator(HITS)).to_have_count(10)


def events(*named: tuple[str, object]) -> str:
    return "".join(f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in named)


def test_an_answer_is_offered_and_cites_the_hits(page: Page) -> None:
    page.route("**/answer/server", lambda route: route.fulfill(json={"server": "chat.example:1"}))
    page.reload()
    answer_with_hits(page, [{"id": "a", "title": "一"}, {"id": "b", "title": "二"}])
    passages = {"passages": [{"id": "a", "title": "一"}, {"id": "b", "title": "二"}]}
    sentence = {"text": "少吃盐<b>。", "citations": [2, 9]}
    body = events(("passages", passages), ("sentence", sentence), ("end", {"left_out": 3}))
    page.route(
        "**/answer", lambda route: route.fulfill(body=body, content_type="text/event-stream")
    )
    expect(page.locator("#answer")).to_be_hidden()
    ask(page, QUESTION)
    box = page.locator("#answer")
    expect(box).to_contain_text("chat.example:1")  # said before anything is sent there
    with page.expect_request("**/answer") as sent:
        page.get_by_role("button", name="写出回答").click()
    assert body_of(sent.value) == {"query": QUESTION, "filter": {}, "top_k": 5, "mode": "hybrid"}
    expect(box.locator("#answer-text")).to_contain_text("少吃盐<b>。")
    expect(page.locator("#answer-status")).to_contain_text("3")
    expect(box.locator(".citation")).to_have_count(1)
    assert (overflow(page), violations(page)) == (0, [])
    box.get_by_role("button", name="资料 2：二").click()
    expect(page.locator(HITS).nth(1)).to_be_focused()

    page.unroute("**/answer")
    body = events(("refusal", {"reason": "unanswered"}), ("end", {"left_out": 0}))
    page.route(
        "**/answer", lambda route: route.fulfill(body=body, content_type="text/event-stream")
    )
    ask(page, "发热")
    expect(box.locator(".citation")).to_have_count(0)
    page.get_by_role("button", name="写出回答").click()
    expect(page.locator("#answer-status")).to_contain_text("没有这个问题的答案")


def test_a_first_search_waits_for_the_index_but_not_for_ever(page: Page) -> None:
    held: list[Route] = []
    page.route("**/index", lambda route: held.append(route))
    page.reload()
    with page.expect_request("**/search") as sent:
        ask(page, QUESTION)
        expect(page.locator("body")).to_have_class("asked")
        held.pop().continue_()
    assert body_of(sent.value)["mode"] == "hybrid"  # which only the index tells
    page.reload()
    with page.expect_request("**/search") as sent:
        ask(page, "发热")
    assert "mode" not in body_of(sent.value)
    expect(page.locator(HITS)).to_have_count(10)
    assert held  # still without an answer
