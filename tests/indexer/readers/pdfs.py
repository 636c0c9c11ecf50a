"""Writes the PDF files of the tests with Chromium: python -m tests.indexer.readers.pdfs."""

from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

FILES = Path(__file__).parent / "files"
_HEADER = "<div style='font-size:9px;margin-left:40px'>某某医院 诊疗手册</div>"
_FOOTER = (
    "<div style='font-size:9px;margin:auto'>第 <span class=pageNumber></span> 页，"
    "共 <span class=totalPages></span> 页</div>"
)
_BREAK = "<div style='page-break-after:always'></div>"
_TABLE = (
    "<table style='width:60%'><tr><td>药名</td><td>剂量</td></tr>"
    "<tr><td>氨氯地平</td><td>5 mg</td></tr></table>"
)
_CHAPTERS = (
    ("高血压", "每天食盐不超过五克，" * 8 + "多吃蔬菜。", _TABLE),
    ("失眠", "睡前少看手机，" * 8 + "按时起床。", ""),
    ("发热", "多喝水，" * 14 + "注意休息。", ""),
)
GUIDE = _BREAK.join(
    f"<h1>{title}</h1><p>{text}</p>{table}<h2>复查</h2><p>{title}之后三个月复查。</p>"
    for title, text, table in _CHAPTERS
)
COLUMNS = "<div style='columns:2'><p>{}</p></div>".format(
    "".join(f"第{number}句话说明怎样护理病人。" for number in range(1, 80))
)
SCAN = """<script>
const canvas = document.createElement("canvas");
canvas.getContext("2d").fillText("scan", 50, 50);
document.write("<img src=" + canvas.toDataURL() + ">");
</script>"""


def main() -> None:
    framed: dict[str, Any] = {
        "display_header_footer": True,
        "header_template": _HEADER,
        "footer_template": _FOOTER,
        "margin": {"top": "60px", "bottom": "60px"},
    }
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox"]
        )
        page = browser.new_page()
        for name, body, options in (
            ("outline", GUIDE, framed | {"outline": True, "tagged": True}),
            ("columns", COLUMNS, {}),
            ("scan", SCAN, {}),
        ):
            page.set_content(f"<meta charset=utf-8><body style='font-weight:400'>{body}")
            page.wait_for_timeout(200)
            page.pdf(path=str(FILES / f"{name}.pdf"), format="A4", **options)
        browser.close()


if __name__ == "__main__":
    main()
