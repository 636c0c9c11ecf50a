"""Processes for tests, forked from a process that has imported the libraries of training.

Importing them takes each new interpreter some 6 seconds.
"""

import multiprocessing
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch.multiprocessing
from torch.distributed import TCPStore

Work = Callable[..., None]
_PRELOADED = [
    "care.cli.train",
    "peft",
    "tests.training.ranks",
    "torch._dynamo",
    "torch.utils.tensorboard",
    "transformers.models.bert.modeling_bert",
    "transformers.models.gte.modeling_gte",
    "transformers.models.qwen3.modeling_qwen3",
]


def forkserver() -> Any:
    """Returns the multiprocessing context that forks processes with these libraries."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def run_in_two_processes(work: Work, *arguments: Any) -> None:
    """Runs `work(rank, *arguments)` in two processes, with the variables that torchrun sets.

    Raises the error of the process that fails first, and then ends the other.
    """
    forkserver()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": store.host,
        "MASTER_PORT": str(store.port),
        # The store of the process that starts the others has the free port that it asked for.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    started = (variables, work, arguments)
    torch.multiprocessing.start_processes(_run, started, nprocs=2, start_method="forkserver")


def _run(rank: int, variables: Mapping[str, str], work: Work, arguments: tuple[Any, ...]) -> None:
    os.environ |= dict(variables) | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    work(rank, *arguments)
