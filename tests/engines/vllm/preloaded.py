"""Processes forked from one that has imported vLLM, which takes an interpreter 10 to 20 s."""

import multiprocessing
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CONTEXT: Any = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "models.encoders.vllm",
        "tests.engines.vllm.forking",
        "vllm.entrypoints.launchers.api_server.entry",
        "vllm.entrypoints.llm",
        "vllm.v1.worker.cpu_worker",
        "transformers.models.qwen3",
    ]
)


class Preloaded:
    """Takes the place of `multiprocessing` where engines are started."""

    @staticmethod
    def get_context(method: str) -> Any:
        assert method == "spawn"
        return CONTEXT


def serve(arguments: Sequence[str], variables: dict[str, str], log: Path) -> None:
    """Runs vLLM's OpenAI server in this process, with its output in a file."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ |= variables
    sys.argv[1:] = arguments
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
