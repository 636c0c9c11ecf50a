"""Tiny checkpoints that the recipes of the paper start from, pretrained for seconds."""

import random
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize
from transformers import AutoTokenizer

from tests.checkpoints import edit_json, write_gte_mlm, write_qwen3
from training.encoder import load_backbone

# Characters of the parts of texts that are told apart, and parts in a batch.
_PART, _BATCH = 24, 32


def write_query_start(folder: Path, texts: Sequence[str]) -> None:
    """Writes an encoder of type "new" with the characters of texts."""
    shape = {"hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 512}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    write_gte_mlm(folder, texts=texts, initializer_range=0.05, **shape, **dropout)
    _pretrain(folder, texts, "", "<s>{}", 0)
    # A normalisation follows the embeddings: smaller ones are the same model, and learn faster.
    file = folder / "model.safetensors"
    state = load_file(file)
    for name in state:
        if "_embeddings.weight" in name:
            state[name] *= 0.1
    save_file(state, file, metadata={"format": "pt"})


def write_document_start(folder: Path, texts: Sequence[str], width: int) -> None:
    """Writes a Qwen3 in bfloat16 whose tokenizer appends nothing, as Qwen3 is published."""
    shape = {"hidden_size": width, "intermediate_size": 2 * width, "max_position_embeddings": 512}
    shape |= {"num_attention_heads": width // 32, "num_key_value_heads": width // 32}
    write_qwen3(folder, ends_texts=False, texts=texts, tokens=1000, initializer_range=0.05, **shape)
    _pretrain(folder, texts, "model.", "{}<|im_end|>", -1)
    file = folder / "model.safetensors"
    state = {name: value.to(torch.bfloat16) for name, value in load_file(file).items()}
    save_file(state, file, metadata={"format": "pt"})
    edit_json(folder / "config.json", dtype="bfloat16")


def _pretrain(
    folder: Path, texts: Sequence[str], prefix: str, form: str, position: int, steps: int = 100
) -> None:
    """Trains a checkpoint to tell parts of one text from those of others.

    Args:
        folder: The checkpoint, whose weights are replaced.
        texts: Texts; those of 48 or more characters are used.
        prefix: Prefix of the backbone's weights in the checkpoint.
        form: Format of an input text.
        position: Position of the state that represents a text, 0 or -1.
        steps: Number of batches.
    """
    torch.manual_seed(0)
    draw = random.Random(0)
    model = load_backbone(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    long = [text for text in texts if len(text) >= 2 * _PART]

    def vectors(parts: list[str]) -> Tensor:
        inputs = tokenizer([form.format(part) for part in parts], add_special_tokens=False)
        last = [len(ids) - 1 if position else 0 for ids in inputs["input_ids"]]
        padded = tokenizer.pad(inputs, padding_side="right", return_tensors="pt")
        states = model(padded["input_ids"], padded["attention_mask"]).last_hidden_state
        return normalize(states[torch.arange(len(parts)), torch.tensor(last)])

    model.train()
    for _ in range(steps):
        sides: tuple[list[str], list[str]] = ([], [])
        for text in draw.sample(long, _BATCH):
            for side in sides:
                first = draw.randrange(len(text) - _PART + 1)
                side.append(text[first : first + _PART])
        scores = 20 * vectors(sides[0]) @ vectors(sides[1]).T
        optimizer.zero_grad()
        cross_entropy(scores, torch.arange(_BATCH)).backward()
        optimizer.step()
    with TemporaryDirectory() as place:
        # Names of weights on disk may differ from those in the model.
        model.save_pretrained(place)
        trained = load_file(Path(place) / "model.safetensors")
    state = load_file(folder / "model.safetensors")
    state |= {f"{prefix}{name}": value for name, value in trained.items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
