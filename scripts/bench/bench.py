"""What scenarios measure with: pairs of runs, ratios pair by pair, efficiency and idle cores."""

from __future__ import annotations

import json
import sqlite3
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import program
from croprow_side import Cost, Croprow
from figures import Figures
from peer_side import BATCH, NAMES, Peers
from places import PROJECT, Work

MIB = 2**20
MEMORY = ("--memory", "512MiB")
# The lowest counts: what disturbs only adds.
FLOORS = 3
PER_IMAGE = "_cpu_s_per_image"


@dataclass
class Bench:
    croprow: Croprow
    peers: Peers
    figures: Figures
    cores: int
    pairs: int
    quick: bool

    def count(self, full: int, quick: int) -> int:
        return quick if self.quick else full

    def warm(self, photos: str, limit: int) -> None:
        """Reads the files, so that nobody waits for the disk."""
        query = "SELECT DISTINCT path FROM (SELECT path FROM images ORDER BY id LIMIT ?)"
        connection = sqlite3.connect(self.croprow.places.photos_of(photos))
        for (path,) in connection.execute(query, (limit,)):
            Path(path).read_bytes()
        connection.close()

    def rounds(self, programs: dict[str, Callable[[], Cost]]) -> dict[str, list[Cost]]:
        """As many rounds as there are pairs, each program once in each; every other round the other way round."""
        costs: dict[str, list[Cost]] = {name: [] for name in programs}
        for number in range(self.pairs):
            names = list(programs) if number % 2 == 0 else list(reversed(programs))
            for name in names:
                cost = programs[name]()
                costs[name].append(cost)
                speed = f"{cost.images_per_s:.2f} images/s, {cost.cpu_s_per_image:.3f} CPU s an image"
                print(f"  {number + 1}: {name}: {speed}, {cost.peak_bytes / MIB:.0f} MiB", file=sys.stderr)
        return costs

    def compare(self, scenario: str, work: Work, peers: list[str]) -> list[Cost]:
        """Pairs with each peer, and the figures of them; returns croprow's runs."""
        self.warm(work.photos, work.limit)
        self.croprow.one_image(work)
        programs: dict[str, Callable[[], Cost]] = {"croprow": lambda: self.croprow.run(work)}
        programs |= {peer: lambda peer=peer: self.peers.run(peer, work) for peer in peers}
        costs = self.rounds(programs)
        for peer in peers:
            self.add_ratio(f"{scenario}/{peer}", NAMES[peer], costs["croprow"], costs[peer])
        strong = costs[peers[0]]
        memory = [mine.peak_bytes / theirs.peak_bytes for mine, theirs in zip(costs["croprow"], strong)]
        note = f"{median_mib(costs['croprow'])} MiB against {median_mib(strong)} MiB"
        self.figures.add(
            f"{scenario}/memory_of_strong_peer", f"peak memory, by {NAMES[peers[0]]}", "x", memory, note
        )  # fmt: skip
        return costs["croprow"]

    def add_ratio(self, name: str, peer: str, mine: list[Cost], theirs: list[Cost]) -> None:
        ratios = [one.images_per_s / other.images_per_s for one, other in zip(mine, theirs)]
        note = f"{median_speed(mine):.2f} against {median_speed(theirs):.2f} images/s"
        self.figures.add(name, f"images/s, by {peer}", "x", ratios, note)

    def add_efficiency(self, scenario: str, work: Work, mine: list[Cost]) -> None:
        """CPU seconds per image by the floor's, and the share of the cores that had nothing to do."""
        batch = mine[0].more["summary"].get("batch", BATCH)
        floors = [self.floor(work, batch) for _ in range(min(self.pairs, FLOORS))]
        floor = min(floors, key=lambda each: sum(each.values()))
        sum_s = sum(floor.values())
        parts = ", ".join(f"{stage} {value * 1000:.1f}" for stage, value in floor.items())
        cpu_ms = 1000 * statistics.median(cost.cpu_s_per_image for cost in mine)
        self.figures.add(
            f"{scenario}/efficiency", "CPU time per image, by the floor", "x",
            [cost.cpu_s_per_image / sum_s for cost in mine],
            f"{cpu_ms:.1f} against {sum_s * 1000:.1f} ms: {parts}",
        )  # fmt: skip
        idle = [100 * max(0.0, cost.idle(self.cores)) for cost in mine]
        self.figures.add(f"{scenario}/idle", "cores without work", "%", idle)

    def add_memory(self, name: str, work: Work) -> None:
        """What memory rises to with `--memory 512MiB`, over one full batch per core of the largest input shape."""
        run = self.croprow.run(work, MEMORY)
        batch = self.croprow.largest_batch()
        photos = self.croprow.most_elongated(self.cores * batch)
        small = self.croprow.start(work, photos, (*MEMORY, "--batch", str(batch)))
        note = f"{work.limit} photos; {small.peak_bytes / MIB:.0f} MiB with {self.cores} batches of {batch}"
        over = (run.peak_bytes - small.peak_bytes) / MIB
        what = f"memory over a batch's, with --memory 512MiB ({work.photos})"
        self.figures.add(name, what, "MiB", [max(0.0, over)], note)

    def floor(self, work: Work, batch: int) -> dict[str, float]:
        """CPU seconds per image by stage, for the regions that croprow's last run found."""
        floor = self.peers.floor(work, self.croprow.database(), batch)
        stages = {key.removesuffix(PER_IMAGE): value for key, value in floor.items() if key.endswith(PER_IMAGE)}
        print(f"  floor in CPU s an image: {json.dumps(stages)}", file=sys.stderr)
        return stages


def example(name: str) -> list[str] | None:
    """A program of the project's `examples` that a measurement needs, if it is built."""
    path = PROJECT / "target/release/examples" / name
    return [str(path)] if path.is_file() else None


def median_speed(costs: list[Cost]) -> float:
    return statistics.median(cost.images_per_s for cost in costs)


def median_mib(costs: list[Cost]) -> int:
    return round(statistics.median(cost.peak_bytes for cost in costs) / MIB)
