"""Wall time and CPU time of a peer's working part: from its models being loaded to its last row being written."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager


def cpu_s() -> float:
    """User and system time of this process and of the children it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class Stopwatch:
    """Made when the program begins; `start` when its models are loaded; `report` at the end."""

    def __init__(self, program: str) -> None:
        self.program = program
        self.began_s = self.started_s = time.perf_counter()
        self.started_cpu_s = 0.0
        self.stopped_s: float | None = None
        self.stages_s: dict[str, float] = {}

    def start(self) -> None:
        self.started_s = time.perf_counter()
        self.started_cpu_s = cpu_s()

    def stop(self) -> None:
        """The last result is there; what follows, such as ending processes, is not the working part's wall time."""
        self.stopped_s = time.perf_counter()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        before = time.perf_counter()
        yield
        self.stages_s[name] = self.stages_s.get(name, 0.0) + time.perf_counter() - before

    def report(self, images: int, **more: object) -> None:
        """One JSON line. Children must have been waited for, else their CPU time is missing."""
        if self.stopped_s is None:
            self.stop()
        line = {
            "program": self.program,
            "images": images,
            "wall_s": round(self.stopped_s - self.started_s, 4),
            "cpu_s": round(cpu_s() - self.started_cpu_s, 4),
            "startup_s": round(self.started_s - self.began_s, 2),
            "stages_s": {name: round(seconds, 3) for name, seconds in self.stages_s.items()},
            **more,
        }
        print(json.dumps(line), flush=True)
