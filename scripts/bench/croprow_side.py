"""croprow's side of a measurement: a new database, `add`, `run --json`, and what that cost.

`seconds` of its summary begins when the models are loaded and ends when the last row is stored, as the peers' wall time
does. CPU time comes from the summary's `cpu_seconds` where there is one. Otherwise it is that of the whole process less
that of a run with one image, which loads the models too; what is left belongs to all images but one.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass, field
from pathlib import Path

import program
from places import Places, Work


@dataclass(frozen=True)
class Cost:
    """Of a program's working part. `peak_bytes` is the whole process's."""

    program: str
    images: int
    wall_s: float
    cpu_s: float
    peak_bytes: int
    more: dict = field(default_factory=dict)

    @property
    def images_per_s(self) -> float:
        return self.images / self.wall_s

    @property
    def cpu_s_per_image(self) -> float:
        return self.cpu_s / self.images

    def idle(self, cores: int) -> float:
        return 1 - self.cpu_s / (self.wall_s * cores)


class Croprow:
    def __init__(self, places: Places, binary: Path, threads: int) -> None:
        self.places, self.binary, self.threads = places, binary, threads
        self._one_image: dict[tuple, program.Finished] = {}

    def database(self) -> Path:
        return self.places.scratch / "croprow.db"

    def run(self, work: Work, extra: tuple[str, ...] = ()) -> Cost:
        """All of the work's photos, once, in a new database (which stays until the next run)."""
        one = self.one_image(work, extra)
        finished = self.start(work, work.limit, extra)
        summary = finished.json_line()
        images = summary["done"]
        if images != work.limit:
            raise program.ProgramFailed(f"croprow did {images} of {work.limit} photos: {self.failures()}")
        cpu_s = summary.get("cpu_seconds")
        if cpu_s is None:
            cpu_s = max(0.0, finished.cpu_s - one.cpu_s) * images / max(1, images - 1)
        more = {"summary": summary, "regions": self.count_regions()}
        return Cost("croprow", images, summary["seconds"], cpu_s, finished.peak_bytes, more)

    def one_image(self, work: Work, extra: tuple[str, ...] = ()) -> program.Finished:
        """The same run on one photo: what loading costs, and the memory that models take. Measured once."""
        key = (work, extra)
        if key not in self._one_image:
            self._one_image[key] = self.start(work, 1, extra)
        return self._one_image[key]

    def start(self, work: Work, photos: int | list[int], extra: tuple[str, ...] = ()) -> program.Finished:
        """The process as a whole, whatever became of the photos: the first so many, or those of these ids."""
        database = self.database()
        for suffix in ("", "-wal", "-shm"):
            Path(f"{database}{suffix}").unlink(missing_ok=True)
        log = self.places.scratch / "croprow.log"
        which = f"LIMIT {photos}" if isinstance(photos, int) else ""
        among = "1" if isinstance(photos, int) else f"id IN ({', '.join(map(str, photos))})"
        query = f"SELECT id, path, prompt FROM images WHERE {among} ORDER BY id {which}"
        source = str(self.places.photos_of(work.photos))
        program.run([str(self.binary), "add", str(database), "--from-sqlite", source, "--query", query], log)
        return program.run([*self.command(work), *extra], log, accepted=(0, 2))

    def command(self, work: Work) -> list[str]:
        detector = ["--detector", str(self.places.model(work.detector))] if work.detector else []
        embedder = ["--embedder", str(self.places.model(work.embedder))]
        common = ["--device", "cpu", "--precision", "fp32", "--threads", str(self.threads), "--json"]
        common += ["--runtime", str(self.places.runtime)]
        return [str(self.binary), "-q", "run", str(self.database()), *detector, *embedder, *common, *work.flags]

    def ask(self, query: str) -> list[tuple]:
        connection = sqlite3.connect(self.database())
        try:
            return connection.execute(query).fetchall()
        finally:
            connection.close()

    def largest_batch(self) -> int:
        """Images in a call, the most that the last run arrived at for any shape."""
        return self.ask("SELECT coalesce(max(images), 1) FROM batch_sizes")[0][0]

    def most_elongated(self, count: int) -> list[int]:
        """Photos of the last run whose shapes make the largest inputs, where a detector keeps their shape."""
        longest = "max(width_px, height_px) * 1.0 / min(width_px, height_px)"
        return [row[0] for row in self.ask(f"SELECT key FROM images ORDER BY {longest} DESC, id LIMIT {count}")]

    def count_regions(self) -> int:
        return self.ask("SELECT count(*) FROM regions")[0][0]

    def failures(self) -> list[tuple]:
        return self.ask("SELECT * FROM failures LIMIT 3")
