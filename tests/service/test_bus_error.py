import os
import subprocess
import sys
from pathlib import Path

import pytest

# Reads a truncated map in a thread: with the GIL, or in C without it while another thread computes.
# The process counts its starts in the file `starts`; the third one ends it.
PROGRAM = """
import ctypes, mmap, os, pathlib, sys, threading
from service.bus_error import restart_on_bus_error

starts = pathlib.Path("starts")
with starts.open("a") as file:
    file.write(f"{os.getpid()}\\n")
if len(starts.read_text().split()) == 3:
    sys.exit(0)
restart_on_bus_error()
with open("mapped", "wb+") as file:
    file.write(bytes(2 * mmap.PAGESIZE))
    file.flush()
    mapped = mmap.mmap(file.fileno(), 0)
    file.truncate(0)
address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
libc = ctypes.CDLL(None)
libc.memchr.argtypes = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
read = {"with": lambda: mapped[0], "without": lambda: libc.memchr(address, 1, 8)}[sys.argv[1]]
threading.Thread(target=read).start()
while True:
    sum(range(1000))
"""


@pytest.mark.parametrize("gil", ["with", "without"])
def test_the_process_starts_again_each_time_with_one_line(tmp_path: Path, gil: str) -> None:
    command = [sys.executable, "-c", PROGRAM, gil]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    assert len(done.stderr.splitlines()) == 2
    process_ids = (tmp_path / "starts").read_text().split()
    assert process_ids == process_ids[:1] * 3
