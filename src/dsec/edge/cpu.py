"""What the two classes of sandboxes use of the CPU and how long they wait for it, by the kernel's own account of their v2 groups.

One sample a second, whatever number of sandboxes there is. The wait of a class (its pressure) also holds waits for a sandbox's own limit.
"""
from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from libdsec.wire import CpuClass

SAMPLES = 60  # one a second: the span of the pressure's average
_TICK = 1 / os.sysconf("SC_CLK_TCK")


class CpuUse:
    """`groups`: the v2 group that holds all sandboxes of a class. A class without one uses nothing."""

    def __init__(self, groups: Mapping[CpuClass, Path], proc: Path = Path("/proc")) -> None:
        self._groups, self._proc = groups, proc
        self._samples: deque[tuple[float, float]] = deque(maxlen=SAMPLES + 1)  # CPU time so far; of it, idle or best effort's
        self.seconds = dict.fromkeys(CpuClass, 0.0)  # used since the group was made
        self.pressure = dict.fromkeys(CpuClass, 0.0)  # percent of the last minute in which some task waited for a CPU

    def sample(self) -> None:
        """Read now. OSError when the kernel shows no /proc/stat."""
        for name, group in self._groups.items():
            self.seconds[name] = _value(group / "cpu.stat", b"usage_usec ") / 1e6
            self.pressure[name] = _value(group / "cpu.pressure", b"some avg10=", b"avg60=")
        with open(self._proc / "stat", "rb") as file:
            times = [int(word) * _TICK for word in file.readline().split()[1:9]]
        self._samples.append((sum(times), times[3] + times[4] + self.seconds[CpuClass.BEST_EFFORT]))

    @property
    def spare(self) -> float:
        """Share of the machine's CPU that neither the latency class nor the host took in the last minute: idle, or best effort's."""
        if len(self._samples) < 2:
            return 1.0
        (total, spare), (total_then, spare_then) = self._samples[-1], self._samples[0]
        return min(1.0, max(0.0, (spare - spare_then) / (total - total_then))) if total > total_then else 1.0


def _value(path: Path, line: bytes, word: bytes = b"") -> float:
    """The number behind `word` (or at once) in the first line that begins with `line`; 0 where there is none."""
    try:
        with open(path, "rb") as file:
            for text in file:
                if text.startswith(line):
                    return float(text[len(line) :].partition(word)[2].split()[0] if word else text[len(line) :])
    except OSError:
        pass  # a kernel without pressure information, or a group that nobody made yet
    return 0.0
