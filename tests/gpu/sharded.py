"""One process of the FSDP2 check: trains a tiny model in bfloat16."""

import json
import sys
import time

import torch
from torch import distributed
from transformers import AutoModel

from training.distributed import gather, local, processes, shard

_STEPS = 10
_ROWS, _LENGTH = 8, 32


def main(checkpoint: str) -> None:
    """Trains with a contrastive loss; the main process prints rate and losses."""
    state = processes()
    torch.manual_seed(0)
    model = AutoModel.from_pretrained(checkpoint, dtype=torch.float32).to(state.device)
    shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(state.process_index)
    shape = (_ROWS, _LENGTH)
    ids = torch.randint(5, model.config.vocab_size, shape, generator=generator).to(state.device)
    targets = torch.arange(_ROWS, device=state.device)
    losses = []
    started = time.perf_counter()
    for _ in range(_STEPS):
        with torch.autocast(state.device.type, torch.bfloat16):
            states = model(input_ids=ids).last_hidden_state
        halves, ends = torch.nn.functional.normalize(
            states[:, [_LENGTH // 2, -1]].float(), dim=-1
        ).unbind(dim=1)
        loss = torch.nn.functional.cross_entropy(halves @ ends.T / 0.05, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    seconds = time.perf_counter() - started
    held = sum(local(value).numel() for value in model.parameters())
    total = sum(value.numel() for value in model.parameters())
    if state.num_processes > 1 and held > 0.75 * total:
        raise RuntimeError(f"a process holds {held} of {total} weights")
    if not losses[-1] < losses[0]:
        raise RuntimeError(f"the loss did not fall: {losses}")
    everywhere = gather(held)
    if state.is_main_process:
        rate = _STEPS * _ROWS * state.num_processes / seconds
        shares = "/".join(f"{n / total:.0%}" for n in everywhere)
        loss_range = f"{losses[0]:.2f} to {losses[-1]:.2f}"
        print(json.dumps({"texts/s": f"{rate:.0f}", "loss": loss_range, "weights": shares}))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
