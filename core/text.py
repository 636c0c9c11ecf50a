"""The text rules: what happens to a text before an encoder's tokenizer sees it.

The indexer and the service call the same functions, so that a document and the
query that asks for it are written alike.
"""

import re
import unicodedata

# Controls, formatting marks (zero-width characters, byte order marks) and lone
# surrogates carry no meaning for retrieval and upset tokenizers.
_INVISIBLE = {"Cc", "Cf", "Cs"}
# A full stop is not among them: it may be that of a number.
_SENTENCE_END = re.compile(r"[。！？!?；;]")


def _keep(character: str) -> bool:
    return character.isspace() or unicodedata.category(character) not in _INVISIBLE


def normalize_text(text: str) -> str:
    """Returns `text` in Unicode form NFC, free of invisible characters, white space collapsed.

    Idempotent. Compatibility forms (full-width letters, `㎎`) are left to the tokenizer,
    which knows the form that its model was trained on.
    """
    if not text.isprintable():
        text = "".join(filter(_keep, text))
    return " ".join(unicodedata.normalize("NFC", text).split())


def document_text(title: str, text: str) -> str:
    """Returns the text that stands for a document: its title, a line break, its text."""
    parts = (normalize_text(title), normalize_text(text))
    return "\n".join(part for part in parts if part)


def with_prompt(prompt: str, text: str) -> str:
    """Returns `text` behind the encoder's prompt."""
    return prompt + text


def first_sentence(text: str) -> str:
    """Returns a text up to the end of its first sentence, the mark included."""
    end = _SENTENCE_END.search(text)
    return (text[: end.end()] if end else text).strip()
