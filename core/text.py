"""Text normalisation, which is applied before an encoder's tokenizer.

The indexer and the service call the same functions, so that documents and queries are
normalised equally.
"""

import re
import unicodedata

# Control characters, formatting characters (zero-width characters, byte order marks) and lone
# surrogates have no meaning for retrieval, and tokenizers handle them inconsistently.
_INVISIBLE = {"Cc", "Cf", "Cs"}
# Without the full stop, which may be a decimal point.
_SENTENCE_END = re.compile(r"[。！？!?；;]")


def _keep(character: str) -> bool:
    return character.isspace() or unicodedata.category(character) not in _INVISIBLE


def normalize_text(text: str) -> str:
    """Returns `text` in Unicode form NFC, without invisible characters, white space collapsed.

    The function is idempotent. Compatibility characters (full-width letters, `㎎`) are not
    changed: the tokenizer maps them to the form that its model was trained on.
    """
    if not text.isprintable():
        text = "".join(filter(_keep, text))
    return " ".join(unicodedata.normalize("NFC", text).split())


def document_text(title: str, text: str) -> str:
    """Returns the text to encode for a document: normalised title, line break, normalised text."""
    parts = (normalize_text(title), normalize_text(text))
    return "\n".join(part for part in parts if part)


def first_sentence(text: str) -> str:
    """Returns the first sentence of a text, including its end mark."""
    end = _SENTENCE_END.search(text)
    return (text[: end.end()] if end else text).strip()
