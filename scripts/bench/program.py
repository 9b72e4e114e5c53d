"""Runs one program in a process group of its own and says what it cost: wall time, CPU time and memory.

Memory is the peak of the resident set, which the kernel keeps; for a program with children it is the largest sum of
proportional set sizes (shared pages counted once) that was seen, looked at twice a second.

Standard library only, and small: a child's peak begins at what its parent had when it was started.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path

# Looking costs CPU time on the cores that are measured.
LOOK_EVERY_S = 0.5
STOP_AFTER_S = 1800

running: set[int] = set()


class ProgramFailed(Exception):
    """A measured program did not do its work; the message holds the end of what it said."""


@dataclass(frozen=True)
class Finished:
    code: int
    output: str
    wall_s: float
    cpu_s: float
    peak_bytes: int

    def json_line(self) -> dict:
        lines = [line for line in self.output.splitlines() if line.startswith("{")]
        if not lines:
            raise ProgramFailed(f"no JSON line in the output: {self.output[-500:]}")
        return json.loads(lines[-1])


def run(command: list[str], log: Path, accepted: tuple[int, ...] = (0,)) -> Finished:
    """What it says on stderr goes to `log`."""
    with log.open("w") as errors:
        began = time.perf_counter()
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, stdin=subprocess.DEVNULL, start_new_session=True
        )
        running.add(process.pid)
        try:
            watch = Watch(process.pid)
            watch.start()
            output = process.stdout.read().decode()
            _, status, usage = os.wait4(process.pid, 0)
            wall_s = time.perf_counter() - began
            process.returncode = os.waitstatus_to_exitcode(status)
        finally:
            watch.over.set()
            kill_group(process.pid)
            running.discard(process.pid)
    if process.returncode not in accepted:
        said = log.read_text()[-2000:]
        raise ProgramFailed(f"exit code {process.returncode} of {' '.join(command)}\n{said}")
    peak_bytes = watch.largest_sum_bytes or usage.ru_maxrss * 1024
    return Finished(process.returncode, output, wall_s, usage.ru_utime + usage.ru_stime, peak_bytes)


class Watch(threading.Thread):
    """Sums over a program and its children, while it has any; ends programs that hang."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid = pid
        self.over = threading.Event()
        self.largest_sum_bytes = 0

    def run(self) -> None:
        ends = time.monotonic() + STOP_AFTER_S
        while not self.over.wait(LOOK_EVERY_S):
            processes = family(self.pid)
            if len(processes) > 1:
                self.largest_sum_bytes = max(self.largest_sum_bytes, sum(map(proportional_bytes, processes)))
            if time.monotonic() > ends:
                kill_group(self.pid)
                return


def family(pid: int) -> list[int]:
    """A process, its children and theirs."""
    found = [pid]
    for parent in found:
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                found += [int(child) for child in children.read_text().split()]
            except OSError:
                continue
    return found


def proportional_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def kill_all() -> None:
    for pid in list(running):
        kill_group(pid)
