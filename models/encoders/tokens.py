"""Where the tokens of a text lie in it."""

from tokenizers import Tokenizer

from core.text import with_prompt


def text_offsets(tokenizer: Tokenizer, prompt: str, text: str) -> list[tuple[int, int]]:
    """Returns start and end of each token that stands for a text, however long it is.

    Prompt and special tokens are among them, and empty. Tokens that are parts of one character,
    as those of byte-level BPE can be, each have all of it.

    Args:
        tokenizer: A tokenizer that may cut texts, without overlap.
        prompt: What is put before the text.
        text: A text under the text rules of `core.text`.
    """
    head = tokenizer.encode(with_prompt(prompt, text))
    behind = len(prompt)
    return [(0, 0)] * sum(head.special_tokens_mask) + [
        (max(start - behind, 0), max(end - behind, 0))
        for part in (head, *head.overflowing)
        for (start, end), special in zip(part.offsets, part.special_tokens_mask, strict=True)
        if not special
    ]
