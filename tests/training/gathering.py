"""A model of one layer whose loss gathers documents of two processes."""

from pathlib import Path

import torch
from torch import Tensor, nn

from training.distributed import all_gather_with_grad
from training.losses import info_nce, l2_normalize

# Numbers of documents per process; they differ, so that gathering must pad rows.
ROWS = (2, 5)
WIDTH = 6


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, queries: Tensor, documents: Tensor) -> Tensor:
        found, offset = all_gather_with_grad(l2_normalize(self.linear(documents)))
        targets = torch.arange(len(queries)) + offset
        return info_nce(l2_normalize(self.linear(queries)), found, targets, 0.1)


def texts(process: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(process)
    return (
        torch.randn(2, WIDTH, generator=generator),
        torch.randn(ROWS[process], WIDTH, generator=generator),
    )


def write_gradients(process: int, path: Path) -> None:
    """Writes the gradients that a process gets from the loss of its texts."""
    model = nn.parallel.DistributedDataParallel(Model())
    model(*texts(process)).backward()
    torch.save(model.module.linear.weight.grad, path)
