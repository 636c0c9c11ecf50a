"""Token states of frozen encoders: computed once, kept in memory-mapped files.

OUT/vectors/<key>/states.values    float16 [tokens, width], unit norm
                  states.offsets   int64 [texts + 1]
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from core.encoders import Role
from core.files import new_folder
from core.rows import Rows, blocks, mapped
from training.distributed import processes, progress
from training.encoder import Encoder, EncoderCheckpoint, autocast, tokenize
from training.schema import Precision

_VALUES, _OFFSETS = "states.values", "states.offsets"
# Texts that are sorted by length at a time.
_SORTED = 2_048


def token_states(
    cache: Path,
    checkpoint: EncoderCheckpoint,
    role: Role,
    texts: Sequence[str],
    *,
    max_length: int,
    batch: int = 32,
    precision: Precision,
) -> Rows:
    """Returns the states of each text's tokens in the last layer, unit norm, cached in `cache`.

    `max_length` tokens of a text are encoded, with the prompt and special tokens. Row i, float16
    [tokens, width], has the tokens of text i.
    """
    settings = f"{checkpoint.key} states {precision} {role} {max_length}"
    digest = hashlib.sha256(settings.encode())
    for text in texts:
        digest.update(hashlib.sha256(text.encode()).digest())
    folder = cache / digest.hexdigest()[:16]
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with new_folder(folder) as partial:
            _write(partial, checkpoint, role, texts, max_length, batch, precision)
    offsets = mapped(folder / _OFFSETS, np.int64)
    values = mapped(folder / _VALUES, np.float16)
    return Rows(values.reshape(int(offsets[-1]), -1), offsets)


@torch.no_grad()
def _write(
    folder: Path,
    checkpoint: EncoderCheckpoint,
    role: Role,
    texts: Sequence[str],
    max_length: int,
    batch: int,
    precision: Precision,
) -> None:
    device = processes().device
    encoder = Encoder(checkpoint, trainable=False).to(device)
    init = checkpoint.init
    shorter = init.model_copy(update={"max_length": min(max_length, init.max_length)})
    cut = checkpoint.model_copy(update={"init": shorter})
    tokens = tokenize(cut, getattr(init.prompts, role), texts)
    tokens.offsets.tofile(folder / _OFFSETS)
    shape = len(tokens.values), encoder.model.config.hidden_size
    written = np.memmap(folder / _VALUES, np.float16, "w+", shape=shape)
    with progress(len(texts), "token states", "text") as bar:
        for part in blocks(len(texts), _SORTED):
            order = part.start + np.argsort(tokens.lengths[part], kind="stable")
            for rows in (order[chosen] for chosen in blocks(len(order), batch)):
                ids, mask = (values.to(device) for values in tokens.padded(rows))
                with autocast(device, precision):
                    states = encoder.states(ids, mask)
                unit = functional.normalize(states.float(), dim=-1).half().cpu().numpy()
                for row, found in zip(rows, unit, strict=True):
                    first, end = tokens.offsets[row], tokens.offsets[row + 1]
                    written[first:end] = found[: end - first]
                bar.update(len(rows))
    written.flush()
