"""Distributed training: the processes that torchrun or accelerate started, or a single one."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, distributed, nn
from torch.distributed.nn.functional import all_gather

if TYPE_CHECKING:
    from accelerate import PartialState


def processes() -> "PartialState":
    """Returns the state of this process: rank, world size, device and barriers.

    Without a GPU, processes communicate by gloo.
    """
    from accelerate import PartialState

    # Without `cpu`, accelerate does not initialise the process group on machines without a GPU.
    return PartialState(cpu=not torch.cuda.is_available())


def all_gather_with_grad(values: Tensor) -> tuple[Tensor, int]:
    """Gathers rows of all processes; gradients flow back to the process of each row.

    Processes may have different numbers of rows: `values` is [n, ...] with an n of each process.

    Returns:
        The rows in the order of ranks, [sum of n, ...], and the offset of this process's rows.
    """
    if not distributed.is_initialized():
        return values, 0
    rank, world = distributed.get_rank(), distributed.get_world_size()
    counts = [torch.zeros(1, dtype=torch.int64, device=values.device) for _ in range(world)]
    distributed.all_gather(counts, torch.tensor([len(values)], device=values.device))
    rows = [int(count) for count in counts]
    padding = (0, 0) * (values.ndim - 1) + (0, max(rows) - len(values))
    parts = all_gather(nn.functional.pad(values, padding))  # type: ignore[no-untyped-call]
    return torch.cat([part[:n] for part, n in zip(parts, rows, strict=True)]), sum(rows[:rank])
