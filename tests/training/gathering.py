"""The work of one of two training processes; has few imports because each process is spawned."""

import torch
from torch import Tensor, distributed, nn

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


def work(process: int, folder: str) -> None:
    torch.set_num_threads(1)
    address = f"file://{folder}/rendezvous"
    distributed.init_process_group("gloo", init_method=address, rank=process, world_size=2)
    model = nn.parallel.DistributedDataParallel(Model())
    model(*texts(process)).backward()
    torch.save(model.module.linear.weight.grad, f"{folder}/{process}.pt")
    # The process group must be destroyed after the model. Its last owner waits for gloo's threads,
    # and the model would wait while it holds the GIL, which these threads need.
    del model
    distributed.destroy_process_group()
