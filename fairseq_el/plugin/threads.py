"""OpenMP threads that share the machine with other processes. Imports torch only when a function needs it.

Between two parallel regions libgomp's threads spin, by default for milliseconds, before they sleep. A second process on
the same cores then waits for threads that do nothing. Sentences per second of the demo model with two threads on two
cores, by GOMP_SPINCOUNT (300000 is libgomp's default), alone, and of each of two processes on a busy machine:

    spins       0    100   1000   3000  10000  300000
    alone     136    138    155    157    164     157
    two       108     80     64     62     31       2
"""

import os
import resource
import sys
import time
from pathlib import Path
from typing import NamedTuple

SPIN_COUNT = 1000  # of the demo alone 10 to 20% slower than with the default, but no collapse beside others
CHOSEN_BY_USER = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
STAT = Path("/proc/stat")
CROWDED = 1.5  # threads per free core from which a run is reported as crowded


def limit_spinning() -> None:
    """Sets libgomp's GOMP_SPINCOUNT, unless the environment has a choice already.

    libgomp reads it when it is loaded, so this has no effect in a process that has imported torch before.
    """
    if "torch" not in sys.modules and not any(name in os.environ for name in CHOSEN_BY_USER):
        os.environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)


class CpuTime(NamedTuple):
    """Seconds since some time in the past."""

    wall: float
    own: float  # CPU seconds of this process and of those that it waited for
    all: float  # CPU seconds of all processes, on the cores that this one may use

    @classmethod
    def now(cls) -> "CpuTime | None":
        """None where the system does not say, that is, elsewhere than on Linux."""
        try:
            busy = busy_seconds(STAT.read_text(), os.sched_getaffinity(0))
        except (OSError, AttributeError, ValueError, IndexError):
            return None
        usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return cls(time.monotonic(), sum(usage.ru_utime + usage.ru_stime for usage in usages), busy)


def busy_seconds(stat: str, cores: set[int]) -> float:
    """CPU seconds of these cores in the text of /proc/stat."""
    ticks = 0
    for line in stat.splitlines():
        name, *numbers = line.split()
        if name.startswith("cpu") and name[3:].isdecimal() and int(name[3:]) in cores:
            user, nice, system, _idle, _iowait, irq, softirq, *_ = map(int, numbers)
            ticks += user + nice + system + irq + softirq
    return ticks / os.sysconf("SC_CLK_TCK")


def free_cores(before: CpuTime | None) -> float | None:
    """How many of the cores that this process may use were not taken by others since `before`; None if unknown."""
    after = CpuTime.now()
    if before is None or after is None or after.wall - before.wall < 0.1:  # ticks are too coarse for less
        return None
    others = (after.all - before.all - (after.own - before.own)) / (after.wall - before.wall)
    cores = len(os.sched_getaffinity(0))
    return min(max(cores - others, 0.0), cores)


def describe_crowding(threads: int, free: float | None) -> str | None:
    """Advice for a run whose threads clearly find too few free cores; None if all is well."""
    if free is None or threads == 1 or threads <= CROWDED * free:
        return None
    return (
        f"other processes keep the cores busy: {free:.1f} were free for {threads} threads, so expect a slower run; "
        f"--threads {max(1, round(free))} suits better while they run"
    )
