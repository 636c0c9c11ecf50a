"""The processes that train together: one, or those that torchrun or accelerate started."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, distributed, nn
from torch.distributed.nn.functional import all_gather

if TYPE_CHECKING:
    from accelerate import PartialState


def processes() -> "PartialState":
    """Returns this process's place among them; on processors they talk by gloo."""
    from accelerate import PartialState

    # Unless it is told, accelerate does not join processes without a GPU.
    return PartialState(cpu=not torch.cuda.is_available())


def all_gather_with_grad(values: Tensor) -> tuple[Tensor, int]:
    """Returns the rows of all processes, with gradients, and the row where this one's begin.

    Processes may have different numbers of rows.
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
