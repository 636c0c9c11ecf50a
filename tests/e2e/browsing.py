"""Helpers for tests of the search page in a browser."""

import json

from playwright.sync_api import Page

QUESTION = "血压高的人平时吃饭要注意什么"

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
