"""Distributed training: the processes that torchrun or accelerate started, or a single one."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.distributed.nn.functional import all_gather
from tqdm import tqdm

if TYPE_CHECKING:
    from accelerate import PartialState

T = TypeVar("T")


def processes() -> "PartialState":
    """Returns the state of this process: rank, world size, device and barriers.

    Without a GPU, processes communicate by gloo.
    """
    from accelerate import PartialState

    # Without `cpu`, accelerate does not initialise the process group on machines without a GPU.
    return PartialState(cpu=not torch.cuda.is_available())


@cache
def _patient_group() -> Any:
    # Gloo notices a process that died; the time-out is for one that works.
    return distributed.new_group(backend="gloo", timeout=timedelta(days=365))


def wait_for_all() -> None:
    """Waits until all processes call this function, however long one of them works.

    Barriers of `processes()` end with an error after the time-out of the process group, ten
    minutes by default, which finds processes that hang in a step of training.
    """
    if distributed.is_initialized():
        distributed.barrier(_patient_group())


def from_main_process(value: T) -> T:
    """Returns the main process's value in all processes, which wait for it as in `wait_for_all`."""
    if not distributed.is_initialized():
        return value
    values = [value]
    distributed.broadcast_object_list(values, group=_patient_group())
    return values[0]


@contextmanager
def main_process_first() -> Iterator[None]:
    """Runs the block in the main process, then in the others, which wait as in `wait_for_all`."""
    main = processes().is_main_process
    if not main:
        wait_for_all()
    yield
    if main:
        wait_for_all()


def progress(total: int | None, label: str, unit: str) -> "tqdm[Any]":
    """Returns a progress bar with rate and time left, shown by the main process after 2 s."""
    shown = processes().is_main_process
    return tqdm(total=total, desc=label, unit=unit, disable=not shown, delay=2, leave=False)


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
