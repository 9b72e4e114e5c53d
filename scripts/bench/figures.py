"""Figures: what was measured, with the bar it is held against. Kept as JSON, so that a run of one scenario replaces
that scenario's figures and no others."""

from __future__ import annotations

import json
import statistics
import time
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path

BARS = Path(__file__).with_name("bars.toml")


@dataclass(frozen=True)
class Figure:
    """`values`: one per pair. `name` begins with the scenario and is the key of bars.toml. Units: x (a ratio), %, MiB,
    images/s, s, cosine."""

    name: str
    what: str
    unit: str
    values: list[float]
    command: str
    machine: str
    versions: str
    measured_on: str
    note: str = ""

    @property
    def scenario(self) -> str:
        return self.name.split("/")[0]

    @property
    def median(self) -> float:
        return statistics.median(self.values)


class Figures:
    """The figures of this run."""

    def __init__(self, machine: str, versions: str, options: str) -> None:
        self.machine, self.versions, self.options = machine, versions, options
        self.found: list[Figure] = []

    def add(self, name: str, what: str, unit: str, values: list[float], note: str = "") -> None:
        command = f"scripts/bench/run.sh --scenario {name.split('/')[0]}{self.options}"
        today = time.strftime("%Y-%m-%d")
        rounded = [float(f"{value:.6g}") for value in values]
        self.found.append(Figure(name, what, unit, rounded, command, self.machine, self.versions, today, note))

    def drop(self, scenario: str) -> None:
        """What a scenario that failed has left."""
        self.found = [figure for figure in self.found if figure.scenario != scenario]

    def store(self, path: Path) -> list[Figure]:
        """Puts them in the place of the same scenarios' older ones; returns all."""
        mine = {figure.scenario for figure in self.found}
        older = [figure for figure in load(path) if figure.scenario not in mine]
        figures = sorted(older + self.found, key=lambda figure: order(figure.scenario))
        part = path.with_name(path.name + ".part")
        part.write_text(json.dumps([asdict(figure) for figure in figures], indent=1) + "\n")
        part.replace(path)
        return figures


def order(scenario: str) -> int:
    known = list(tomllib.loads(BARS.read_text()))
    return known.index(scenario) if scenario in known else len(known)


def load(path: Path) -> list[Figure]:
    return [Figure(**each) for each in json.loads(path.read_text())] if path.is_file() else []


@dataclass(frozen=True)
class Bar:
    at_least: float | None = None
    at_most: float | None = None

    def __str__(self) -> str:
        return f"≥ {self.at_least:g}" if self.at_least is not None else f"≤ {self.at_most:g}"

    def verdict(self, value: float, unit: str) -> str:
        """"met", or how far the median is from it: in points for percentages, else as a share of the bar."""
        bound = self.at_least if self.at_least is not None else self.at_most
        missed = value < bound if self.at_least is not None else value > bound
        if not missed:
            return "met"
        distance = abs(value - bound)
        return f"missed by {distance:.1f} points" if unit == "%" else f"missed by {distance / bound:.2%}"


def bars() -> dict[str, Bar]:
    tables = tomllib.loads(BARS.read_text())
    return {
        f"{scenario}/{name}": Bar(**bar) for scenario, entries in tables.items() for name, bar in entries.items()
    }
