import math
import os
from pathlib import Path

_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


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
