"""Helpers for tests of the search page in a browser."""

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Error, Page, Request, Route

QUESTION = "血压高的人平时吃饭要注意什么"

# Waits for the end of what fades or moves, except what does so for ever.
_BE_STILL = """() => Promise.all(
  document.getAnimations()
    .filter((one) => isFinite(one.effect.getTiming().iterations))
    .map((one) => one.finished.catch(() => null))
).then(() => null)"""
# The texts whose contrast with their background is below 4.5, with their contrast. A text is taken
# to stand on the nearest background that is not transparent.
_FAINT_TEXTS = """() => {
  const channels = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const luminance = (colour) => {
    const [r, g, b] = channels(colour).map((value) => {
      const share = value / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const background = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const colour = getComputedStyle(at).backgroundColor;
      if (channels(colour)[3] !== 0) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const faint = [];
  while (texts.nextNode()) {
    const node = texts.currentNode.parentElement;
    if (!texts.currentNode.data.trim() || !node.checkVisibility()) continue;
    const pair = [getComputedStyle(node).color, background(node)].map(luminance);
    const contrast = (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
    if (contrast < 4.5) faint.push(`${contrast.toFixed(2)} ${texts.currentNode.data.trim()}`);
  }
  return faint;
}"""


def ask(page: Page, question: str) -> None:
    page.fill("#query", question)
    page.press("#query", "Enter")


def body_of(request: Request) -> dict[str, Any]:
    """Returns the JSON object in the body of a request."""
    body = request.post_data_json
    assert isinstance(body, dict)
    return body


def answer_with_problem(page: Page, status: int, body: object, mode: str = "") -> None:
    """Answers searches, or those in a mode, with an error."""
    content = {"status": status, "content_type": "application/problem+json"}
    page.route(
        "**/search",
        lambda route: (
            route.fulfill(**content, body=json.dumps(body))
            if not mode or route.request.post_data_json.get("mode") == mode
            else route.continue_()
        ),
    )


def answer_with_hits(page: Page, hits: list[dict[str, Any]], **fields: object) -> None:
    """Answers searches with these hits, of which missing fields are made up."""
    answer = {
        "index": {"name": "sample", "version": "v1"},
        "timings_ms": {},
        "mode": "hybrid",
        "cached": False,
        "failed_channels": [],
        "reranked": False,
        "answerable": None,
    }
    made_up = {"title": "", "text": "", "metadata": {}, "score": 0.5, "evidence": None}
    full = [{"id": f"d{i}", "rank": i, **made_up, **hit} for i, hit in enumerate(hits, 1)]
    page.route("**/search", lambda route: route.fulfill(json=answer | {"hits": full} | fields))


def change_index(page: Page, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes what the service says of its index, from the next load of the page on."""

    def respond(route: Route) -> None:
        with suppress(Error):  # the page was left before the answer came
            index = route.fetch().json()
            change(index)
            route.fulfill(json=index)

    page.route("**/index", respond)


def open_panel(page: Page) -> None:
    """Opens the sheet of filters and options; at wide windows they stand at the side."""
    if page.locator("#open-filters").is_visible():
        page.locator("#open-filters").click()


def unfold(page: Page, field: str) -> None:
    """Opens a field of the filters, which is open already if the window was wide at the start."""
    page.locator("details.filter", has_text=field).evaluate("node => { node.open = true; }")


def violations(page: Page) -> list[str]:
    """Returns the rules of axe that the page violates, with the nodes, once it has faded in."""
    page.evaluate(_BE_STILL)
    found = Axe().run(page).response["violations"]
    return [f"{rule['id']}: {[node['html'] for node in rule['nodes']]}" for rule in found]


def faint_texts(page: Page) -> list[str]:
    """Returns the visible texts whose contrast is below 4.5 : 1."""
    faint: list[str] = page.evaluate(_FAINT_TEXTS)
    return faint


def overflow(page: Page) -> int:
    """Returns by how many pixels the page is wider than its window."""
    wider: int = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    return wider


def heading_levels(page: Page) -> list[int]:
    """Returns the levels of the visible headings, in order."""
    names = page.locator("h1, h2, h3, h4, h5, h6").evaluate_all(
        "all => all.filter(e => e.checkVisibility()).map(e => e.tagName)"
    )
    return [int(name[1]) for name in names]
