"""Writes the table of all figures as Markdown.

Example: report.py scripts/bench/RESULTS.json scripts/bench/RESULTS.md
"""

from __future__ import annotations

import argparse
from itertools import groupby
from pathlib import Path

from figures import Bar, Figure, bars, load

HEAD = """# Measured speed and memory

Written by `scripts/bench/run.sh`; the programs it compares with and what each figure means are in
[README.md](README.md). Each program of a pair runs on the same photos, the same models, the same cores; pairs
alternate. A figure is the median over the pairs, with the range in brackets.
"""
TABLE = "| figure | bar | measured | | note |\n| --- | --- | --- | --- | --- |\n"


def number(value: float, unit: str) -> str:
    digits = {"x": 2, "%": 1, "MiB": 0, "images/s": 1, "s": 3, "cosine": 6}[unit]
    return f"{value:.{digits}f}"


def measured(figure: Figure) -> str:
    """Median, unit, and the range of several."""
    unit = "" if figure.unit in ("x", "cosine") else f" {figure.unit}"
    text = number(figure.median, figure.unit) + unit
    if len(figure.values) > 1:
        low, high = (number(value, figure.unit) for value in (min(figure.values), max(figure.values)))
        text += f" ({low} to {high})"
    return text


def line(figure: Figure, bar: Bar | None) -> str:
    verdict = bar.verdict(figure.median, figure.unit) if bar else ""
    return f"| {figure.what} | {bar or ''} | {measured(figure)} | {verdict} | {figure.note} |\n"


def section(scenario: str, figures: list[Figure]) -> str:
    known = bars()
    first = figures[0]
    lines = "".join(line(figure, known.get(figure.name)) for figure in figures)
    setting = f"{first.measured_on}, {first.machine}; {first.versions}"
    return f"\n## {scenario}\n\n    {first.command}\n\n{setting}\n\n{TABLE}{lines}"


def summary(figures: list[Figure]) -> str:
    known = bars()
    judged = [figure for figure in figures if figure.name in known]
    missed = [figure.name for figure in judged if known[figure.name].verdict(figure.median, figure.unit) != "met"]
    text = f"\n{len(judged) - len(missed)} of {len(judged)} bars are met."
    return text + (f" Missed: {', '.join(missed)}.\n" if missed else "\n")


def write(figures: list[Figure], path: Path) -> None:
    sections = [section(name, list(group)) for name, group in groupby(figures, key=lambda figure: figure.scenario)]
    path.write_text(HEAD + summary(figures) + "".join(sections))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", type=Path, help="JSON that measure.py wrote")
    parser.add_argument("table", type=Path, help="Markdown to write")
    arguments = parser.parse_args()
    write(load(arguments.figures), arguments.table)


if __name__ == "__main__":
    main()
