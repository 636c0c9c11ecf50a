"""Cleaning of texts for a benchmark: HTML, length, duplicates, personal data."""

import contextlib
import html
import io
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from core.text import normalize_text
from core.types import Document

with contextlib.redirect_stdout(io.StringIO()):  # it prints a greeting
    import jionlp

# Not HTML that merely looks like it: "WBC<4.0" and ">10" are values.
_TAG = re.compile(r"</?[a-zA-Z][^<>]*>")
_WECHAT = re.compile(
    r"((?:微信号?|[vV][xX]|weixin|wechat)\s*[:：]?\s*)[a-zA-Z][\w-]{5,19}", re.IGNORECASE
)
_NAME = re.compile(
    r"((?:我叫|姓名\s*[:：]|我的名字[是叫])\s*)[\u4e00-\u9fff]{2,3}(?=[，。,.；;！!\s]|$)"
)


def anonymize(text: str) -> str:
    """Returns `text` with marks such as `<tel>` in place of personal data.

    Replaced are phone and identity numbers, addresses of mail and web, QQ and WeChat numbers,
    and names that follow words such as 我叫. Phones and ids go first: a QQ number is any run of
    digits. Other names, and places, need a recogniser of their own. Network addresses are left:
    they are rarer than rows of values that look like one.
    """
    text = jionlp.replace_url(text, token="<url>")
    text = jionlp.replace_email(text, token="<email>")
    text = jionlp.replace_id_card(text, token="<id>")
    text = jionlp.replace_phone_number(text, token="<tel>")
    text = jionlp.replace_qq(text, token="<qq>", strict=True)
    text = _WECHAT.sub(r"\1<wechat>", text)
    return _NAME.sub(r"\1<name>", text)


def clean(text: str, *, anonymous: bool) -> str:
    """Returns `text` under the text rules, without HTML and, if asked to, personal data."""
    text = normalize_text(html.unescape(_TAG.sub(" ", text)))
    return anonymize(text) if anonymous else text


def clean_queries(
    queries: Mapping[str, str], chars: tuple[int, int], *, anonymous: bool
) -> tuple[dict[str, str], Counter[str]]:
    """Cleans queries; drops those too short or too long, and all but the first of equal ones.

    Also returns how many were kept, dropped for which reason, or anonymised.
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
    """Cleans documents likewise; their length and equality are those of the text alone."""
    kept, counts = clean_queries({d.id: d.text for d in documents}, chars, anonymous=anonymous)
    return [
        replace(d, title=clean(d.title, anonymous=anonymous), text=kept[d.id])
        for d in documents
        if d.id in kept
    ], counts
