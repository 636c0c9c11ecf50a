import math
import os
from pathlib import Path

_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


def available_cpus(cpu_max: Path = _CPU_MAX) -> int:
    """Returns the processors that this process may use, at least 1.

    The smaller of the affinity mask and the cgroup v2 quota: thread pools sized by the
    machine's core count stall in a container that is allowed less.
    """
    cpus = len(os.sched_getaffinity(0))
    try:
        quota, period = cpu_max.read_text().split()
    except (OSError, ValueError):
        return cpus
    if quota == "max":
        return cpus
    return max(1, min(cpus, math.ceil(int(quota) / int(period))))
