import math
import os
from pathlib import Path

_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
CPU_INFO = Path("/proc/cpuinfo")


def available_cpus(cpu_max: Path = _CPU_MAX) -> int:
    """Returns the number of processors that this process may use, at least 1.

    It is the minimum of the affinity mask and the cgroup v2 quota: in a container with a lower
    quota, thread pools of the machine's core count are throttled.
    """
    cpus = len(os.sched_getaffinity(0))
    try:
        quota, period = cpu_max.read_text().split()
    except (OSError, ValueError):
        return cpus
    if quota == "max":
        return cpus
    return max(1, min(cpus, math.ceil(int(quota) / int(period))))


def cpu_flags(cpu_info: Path = CPU_INFO) -> set[str]:
    """Returns the names of the processor's instruction sets, as Linux lists them."""
    try:
        lines = cpu_info.read_text().splitlines()
    except OSError:
        return set()
    for line in lines:
        name, _, flags = line.partition(":")
        if name.strip() in ("flags", "Features"):  # of x86, of ARM
            return set(flags.split())
    return set()
