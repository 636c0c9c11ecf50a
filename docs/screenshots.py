"""Takes the pictures of the search page in README.md and README.zh.md: needs Chromium.

Usage, in the environment of `make test`, beside the service of `make demo`:

    python docs/screenshots.py http://127.0.0.1:8000
"""

import io
import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

IMAGES = Path(__file__).parent / "images"
QUESTION = "高血压患者饮食上要注意什么？"
SIZE = {"width": 1120, "height": 620}
COLOURS = 128  # of a palette, which makes a picture of text a third as large


def main(url: str) -> None:
    """Writes a picture of the page with hits in each language."""
    names = ("chromium", "chromium-browser", "google-chrome")
    executable = next(filter(None, map(shutil.which, names)))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        for name, locale in (("page-zh", "zh-CN"), ("page-en", "en-GB")):
            page = browser.new_page(locale=locale, viewport=SIZE)
            page.goto(url)
            page.fill("#query", QUESTION)
            page.press("#query", "Enter")
            page.locator(".hits li").first.wait_for()
            page.locator("h1").click()  # takes the focus, and its ring, from the question
            with Image.open(io.BytesIO(page.screenshot(animations="disabled"))) as shot:
                small = shot.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
                small.save(IMAGES / f"{name}.png", optimize=True)
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
