"""Cleaning of texts: HTML, width, length, duplicates, personal data."""

import contextlib
import html
import io
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from core.text import normalize_text
from core.types import Document
from curation.config import Cleaning

with contextlib.redirect_stdout(io.StringIO()):  # jionlp prints a greeting
    import jionlp

# A tag begins with a letter: "WBC<4.0" and ">10" are values.
_TAG = re.compile(r"</?[a-zA-Z][^<>]*>")
# Tags that were escaped, as in "&lt;p&gt;". Known names only: "ALT<AST，TBIL>17" has no tag.
_ESCAPED_TAG = re.compile(
    r"</?(?:a|b|br|div|em|font|h[1-6]|hr|i|img|li|ol|p|span|strong|table|tbody|td|th|tr|u|ul)"
    r"(?:\s[^<>]*|/)?>",
    re.IGNORECASE,
)
# Full-width digits, letters and the signs of addresses; Chinese punctuation is kept.
_HALF_WIDTH = {
    ord(wide): ord(wide) - 0xFEE0 for wide in map(chr, range(0xFF01, 0xFF5F)) if wide.isalnum()
} | {ord(wide): ord(wide) - 0xFEE0 for wide in "＠－＿．／％＋"}
_WECHAT = re.compile(
    r"((?:微信号?|[vV][xX]|加[vV]|weixin|wechat)\s*[:：]?\s*)[a-zA-Z][\w-]{5,19}", re.IGNORECASE
)
_NAME = re.compile(
    r"((?:我叫|姓名\s*[:：]|我的名字[是叫])\s*)[\u4e00-\u9fff]{2,3}(?=[，。,.；;！!\s]|$)"
)


def anonymize(text: str) -> str:
    """Returns `text` with tokens such as `<tel>` in place of personal data.

    Phone and identity numbers, e-mail and web addresses, QQ and WeChat accounts, and names that
    follow words such as 我叫 are replaced. Phone and identity numbers are replaced before QQ
    numbers, which are any run of digits. Other names and places are kept: they need named-entity
    recognition. IP addresses are kept too: in medical texts most matches are rows of values.
    """
    text = jionlp.replace_url(text, token="<url>")
    # The pattern of the library needs a character before and after the address.
    text = jionlp.replace_email(f"\n{text}\n", token="<email>").strip("\n")
    text = jionlp.replace_id_card(text, token="<id>")
    text = jionlp.replace_phone_number(text, token="<tel>")
    text = jionlp.replace_qq(text, token="<qq>", strict=True)
    text = _WECHAT.sub(r"\1<wechat>", text)
    return _NAME.sub(r"\1<name>", text)


def clean(text: str, *, anonymous: bool) -> str:
    """Returns `text` normalised, without HTML, with half-width digits and letters.

    Args:
        text: Any text.
        anonymous: Whether personal data are replaced, see `anonymize`.
    """
    text = _ESCAPED_TAG.sub(" ", html.unescape(_TAG.sub(" ", text)))
    text = normalize_text(text.translate(_HALF_WIDTH))
    return anonymize(text) if anonymous else text


def clean_queries(
    queries: Mapping[str, str], chars: tuple[int, int], *, anonymous: bool
) -> tuple[dict[str, str], Counter[str]]:
    """Cleans queries and drops those that are too short, too long or duplicates.

    Args:
        queries: Texts by id.
        chars: The least and the greatest number of characters.
        anonymous: Whether personal data are replaced, see `anonymize`.

    Returns:
        The queries that are kept, and counts: `kept`, `too_short`, `too_long`, `duplicate`, and
        `anonymized`, those among the kept ones in which personal data were replaced.
    """
    shortest, longest = chars
    kept: dict[str, str] = {}
    seen: set[str] = set()
    counts = Counter({"kept": 0, "too_short": 0, "too_long": 0, "duplicate": 0, "anonymized": 0})
    for id_, raw in queries.items():
        plain = clean(raw, anonymous=False)
        text = anonymize(plain) if anonymous else plain
        if len(text) < shortest:
            counts["too_short"] += 1
        elif len(text) > longest:
            counts["too_long"] += 1
        elif text in seen:
            counts["duplicate"] += 1
        else:
            seen.add(text)
            kept[id_] = text
            counts["kept"] += 1
            counts["anonymized"] += text != plain
    return kept, counts


def clean_documents(
    documents: Sequence[Document], chars: tuple[int, int], *, anonymous: bool
) -> tuple[list[Document], Counter[str]]:
    """Cleans documents as `clean_queries` cleans queries; length and equality ignore the title."""
    kept, counts = clean_queries({d.id: d.text for d in documents}, chars, anonymous=anonymous)
    return [
        replace(d, title=clean(d.title, anonymous=anonymous), text=kept[d.id])
        for d in documents
        if d.id in kept
    ], counts


def clean_inputs(
    documents: Sequence[Document], queries: Mapping[str, str], options: Cleaning
) -> tuple[list[Document], dict[str, str], dict[str, dict[str, int]]]:
    """Cleans what a command reads; returns documents, queries, and the counts of both."""
    anonymous = options.anonymize
    kept_documents, document_counts = clean_documents(
        documents, options.document_chars, anonymous=anonymous
    )
    kept_queries, query_counts = clean_queries(queries, options.query_chars, anonymous=anonymous)
    counts = {"documents": dict(document_counts), "queries": dict(query_counts)}
    return kept_documents, kept_queries, counts
