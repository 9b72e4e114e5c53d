"""Measures croprow's release binary side by side with Python programs that do the same. See README.md here.

Example: measure.py --scenario video --pairs 3
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import program
import report
from bench import Bench
from croprow_side import Croprow
from figures import Figures
from peer_side import Peers
from places import PROJECT, Places
from scenarios import SCENARIOS


LIBRARIES = ("onnxruntime", "torch", "transformers", "pillow")


def machine(cores: int) -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{cores} cores of {model}, {memory_gib:.0f} GiB"


def versions(binary: Path) -> str:
    """croprow's commit, and the libraries that the peers stand on."""
    git = subprocess.run(
        ["git", "-C", str(PROJECT), "describe", "--always"], capture_output=True, text=True, check=False
    )
    # The table itself changes with every measurement.
    others = [".", ":!scripts/bench/RESULTS.*"]
    changed = subprocess.run(["git", "-C", str(PROJECT), "diff", "--quiet", "HEAD", "--", *others], check=False)
    says = subprocess.run([str(binary), "--version"], capture_output=True, text=True, check=False).stdout.strip()
    libraries = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in LIBRARIES)
    commit = git.stdout.strip() + ("-dirty" if changed.returncode == 1 else "") or "no git"
    return f"{says or 'croprow'} ({commit}), {libraries}, Python {platform.python_version()}"


def say_if_busy(cores: int) -> None:
    load = os.getloadavg()[0]
    if load > 0.3 * cores:
        print(f"note: this machine is busy (load {load:.1f} on {cores} cores); figures will be off", file=sys.stderr)


def stop(_signal: int, _frame: object) -> None:
    program.kill_all()
    sys.exit(130)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", action="append", choices=SCENARIOS, help="repeatable; default: all")
    parser.add_argument("--pairs", type=int, default=None, help="runs of each program (default 5, with --quick 1)")
    parser.add_argument("--quick", action="store_true", help="few photos, one pair: does it still work?")
    parser.add_argument("--binary", type=Path, default=PROJECT / "target/release/croprow")
    parser.add_argument("--cores", type=int, help="use the first of those that this process may use")
    parser.add_argument("--out", type=Path, help="table to write; the figures go beside it as JSON")
    arguments = parser.parse_args()
    if arguments.pairs is not None and arguments.pairs < 1:
        parser.error("--pairs wants 1 or more")
    return arguments


def main() -> None:
    arguments = parse()
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    if arguments.cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.cores])
    cores = len(os.sched_getaffinity(0))
    places = Places.of_project()
    default = places.bench / "quick.md" if arguments.quick else Path(__file__).with_name("RESULTS.md")
    table = arguments.out or default
    options = "".join(
        [f" --pairs {arguments.pairs}" if arguments.pairs else "", " --quick" if arguments.quick else ""]
    )  # fmt: skip
    bench = Bench(
        croprow=Croprow(places, arguments.binary, cores),
        peers=Peers(places, cores),
        figures=Figures(machine(cores), versions(arguments.binary), options),
        cores=cores,
        pairs=arguments.pairs or (1 if arguments.quick else 5),
        quick=arguments.quick,
    )
    failed = []
    for name in arguments.scenario or SCENARIOS:
        say_if_busy(cores)
        began = time.monotonic()
        print(f"{name}:", file=sys.stderr)
        try:
            SCENARIOS[name](bench)
        except (program.ProgramFailed, OSError, sqlite3.Error) as error:
            print(f"error: {name}: {error}", file=sys.stderr)
            bench.figures.drop(name)
            failed.append(name)
        else:
            # After each: a run that is cut short keeps what it has.
            report.write(bench.figures.store(table.with_suffix(".json")), table)
        print(f"  {time.monotonic() - began:.0f} s", file=sys.stderr)
    print(f"the table is in {table}", file=sys.stderr)
    if failed:
        sys.exit(f"error: not measured: {', '.join(failed)}")


if __name__ == "__main__":
    main()
