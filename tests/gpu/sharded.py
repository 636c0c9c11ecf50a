"""One process of the FSDP2 checks: trains a decoder, or a LoRA adapter of it, in bfloat16.

Usage: torchrun -m tests.gpu.sharded CHECKPOINT lora|all
"""

import json
import sys
import time
from pathlib import Path

import torch
from torch import distributed

from training.distributed import gather, local, processes
from training.encoder import Encoder, EncoderCheckpoint, autocast
from training.losses import info_nce, l2_normalize
from training.schema import EncoderInit, Lora

_STEPS = 10
_ROWS = 8


def main(checkpoint: str, trained: str) -> None:
    """Trains with a contrastive loss; the main process prints rate, losses and shares."""
    state = processes()
    torch.manual_seed(0)
    lora = Lora(r=32, alpha=64) if trained == "lora" else None
    dtype = "bfloat16" if lora else "float32"
    init = EncoderInit(
        start=checkpoint, pooling="last_token", max_length=128, lora=lora, dtype=dtype
    )
    found = EncoderCheckpoint(
        folder=Path(checkpoint),
        adapter=None,
        init=init,
        native_dimension=1,
        model="random",
        revision="1",
        key="",
    )
    encoder = Encoder(found, trainable=True, gradient_checkpointing=True).to(state.device)
    encoder.shard()
    rates = [value for value in encoder.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(rates, lr=1e-3)
    config = encoder.model.config
    length = min(512, config.max_position_embeddings)
    generator = torch.Generator().manual_seed(state.process_index)
    shape = (2 * _ROWS, length)
    ids = torch.randint(5, config.vocab_size, shape, generator=generator).to(state.device)
    # The document of a query begins as the query does.
    ids[_ROWS:, : length // 2] = ids[:_ROWS, : length // 2]
    mask = torch.ones_like(ids)
    losses, seconds = [], []
    for _ in range(_STEPS):
        started = time.perf_counter()
        with autocast(state.device, "bf16"):
            vectors = encoder.embed(ids, mask, mini_batch=_ROWS)
        queries, documents = l2_normalize(vectors).split(_ROWS)
        loss = info_nce(queries, documents, torch.arange(_ROWS, device=state.device), 0.05)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
        seconds.append(time.perf_counter() - started)
    held = sum(local(value).numel() for value in encoder.parameters())
    total = sum(value.numel() for value in encoder.parameters())
    if state.num_processes > 1 and held > 0.75 * total:
        raise RuntimeError(f"a process holds {held} of {total} weights")
    if not losses[-1] < losses[0]:
        raise RuntimeError(f"the loss did not fall: {losses}")
    everywhere = gather(held)
    if state.is_main_process:
        step = sorted(seconds[1:])[(_STEPS - 1) // 2]
        figures = {
            "step": f"{1000 * step:.0f} ms",
            "tokens/s": f"{2 * _ROWS * length * state.num_processes / step:.0f}",
            "loss": f"{losses[0]:.2f} to {losses[-1]:.2f}",
            "weights": "/".join(f"{n / total:.0%}" for n in everywhere),
            "trained": f"{sum(value.numel() for value in rates):,} of {total:,}",
        }
        if state.device.type == "cuda":
            figures["GPU memory"] = f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
        print(json.dumps(figures))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
