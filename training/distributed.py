"""Distributed training: the processes that torchrun or accelerate started, or a single one."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.nn.functional import all_gather
from torch.distributed.tensor import DTensor

from core.progress import Progress, progress_bar

if TYPE_CHECKING:
    from accelerate import PartialState

T = TypeVar("T")
# How long processes wait for each other. A process that died is found at once: torchrun then ends
# the others. `TIMEOUT` finds one that hangs in a step of training or while it writes a checkpoint.
# What takes as long as the data are large (reading, encoding, mining) has no time-out.
TIMEOUT = timedelta(hours=2)
_NO_TIMEOUT = timedelta(days=365)


def processes() -> "PartialState":
    """Returns rank, world size, device and barriers of this process (gloo without a GPU)."""
    from accelerate import PartialState

    # Without `cpu`, accelerate does not initialise the process group on machines without a GPU.
    return PartialState(cpu=not torch.cuda.is_available(), timeout=TIMEOUT)


@cache
def _patient_group() -> Any:
    return distributed.new_group(backend="gloo", timeout=_NO_TIMEOUT)


def wait_for_all() -> None:
    """Waits until all processes call this function, however long one of them works.

    Barriers of `processes()` end with an error after `TIMEOUT`.
    """
    if distributed.is_initialized():
        distributed.barrier(_patient_group())


def from_main_process(compute: Callable[[], T]) -> T:
    """Returns in all processes what the main process computes; the value is pickled."""
    main = processes().is_main_process
    if not distributed.is_initialized():
        return compute()
    group = _patient_group()  # made by all processes before one of them works
    values = [compute() if main else None]
    distributed.broadcast_object_list(values, group=group)
    return cast(T, values[0])


@contextmanager
def main_process_first() -> Iterator[None]:
    """Runs the block in the main process, then in the others, which wait as in `wait_for_all`."""
    main = processes().is_main_process
    if not main:
        wait_for_all()
    yield
    if main:
        wait_for_all()


def progress(total: int | None, label: str, unit: str) -> AbstractContextManager[Progress]:
    """Returns a progress bar with rate and time left, shown by the main process after 2 s."""
    shown = processes().is_main_process
    return progress_bar(label, total=total, unit=unit, show=shown, delay=2, leave=False)


def all_gather_with_grad(values: Tensor) -> tuple[Tensor, int]:
    """Gathers rows of all processes; gradients flow back to the process of each row.

    Processes may have different numbers of rows: `values` is [n, ...] with an n of each process.

    Returns:
        The rows in the order of ranks, [sum of n, ...], and the offset of this process's rows.
    """
    if not distributed.is_initialized():
        return values, 0
    rows = gather(len(values))
    padding = (0, 0) * (values.ndim - 1) + (0, max(rows) - len(values))
    parts = all_gather(nn.functional.pad(values, padding))  # type: ignore[no-untyped-call]
    offset = sum(rows[: distributed.get_rank()])
    return torch.cat([part[:n] for part, n in zip(parts, rows, strict=True)]), offset


def gather(number: int) -> list[int]:
    if not distributed.is_initialized():
        return [number]
    found = [0] * distributed.get_world_size()
    distributed.all_gather_object(found, number)
    return found


def shard(model: Any) -> None:
    """Shards the weights of a transformers model over all processes, in place (FSDP2).

    The weights of a block, such as a layer, are gathered only while the block is computed. All
    weights keep their dtype: computation and gradients are those of an unsharded model. The
    model may have an adapter of peft.
    """
    state = processes()
    mesh = init_device_mesh(state.device.type, (state.num_processes,))
    blocks = set(getattr(model, "_no_split_modules", None) or ())
    for module in list(model.modules()):
        if type(module).__name__ in blocks:
            fully_shard(module, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)


def local(value: Tensor) -> Tensor:
    """Returns the part of a tensor that this process holds."""
    return value.to_local() if isinstance(value, DTensor) else value


def whole_state(module: nn.Module, *, trained: bool = False) -> dict[str, Tensor]:
    """Returns the weights of a module, gathered from all processes if they are sharded.

    All processes must call it; all but the main process get an empty dictionary. With `trained`,
    only weights that are trained are returned.
    """
    names = {name for name, value in module.named_parameters() if value.requires_grad}
    state = {}
    for name, value in module.state_dict().items():
        if not trained or name in names:
            gathered = value.full_tensor() if isinstance(value, DTensor) else value
            if processes().is_main_process:
                state[name] = gathered.cpu().contiguous()
    return state
